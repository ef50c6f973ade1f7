#!/usr/bin/env bash
# Every row of the paper's tables across seeds, or maskers of your choice on your data; then report.py. A row
# that fails says so, and the rest go on.
#
#   bash run_all.sh                     all rows; started again, it goes on where it stopped
#   QUICK=1 bash run_all.sh             the same rows on the embedded data and LM, no download, minutes
#   CLS=my.csv LMS=roberta-base MASKERS="none random whole tfidf" SEEDS="0 1 2 3 4 5 6 7 8 9" bash run_all.sh
#   bash run_all.sh --list              prints the commands for a scheduler; those that learn must end first
#
# Choose with environment variables, lists with spaces between:
#   MASKERS        any --masker of pretrain.py; nmg, search and sampled are learned first; nmg-alone and
#                  nmg-fresh are the ablations of table 3. Flags of pretrain.py for one row after commas:
#                  random,--p=0.3-0.15
#   QA, CLS        data sets of each task (names or paths)             LMS, SEEDS
#   JOBS=2         commands at once                                    OUT=runs    where everything goes
#   PRETRAIN_FLAGS, FINETUNE_FLAGS, NMG_FLAGS, SEARCH_FLAGS
#                  more flags for every command of a script, such as PRETRAIN_FLAGS=--spacy_model=FOLDER; with
#                  other flags the same rows need another OUT, as one table compares equal settings only
#
# shellcheck disable=SC2086       # names have no spaces
set -eo pipefail
# Paths are those of where you are; the scripts lie beside this file.
here=${0%run_all.sh}
[[ ! "${here:-.}" -ef . ]] || here=""
# Where data sets of one kind are chosen, those of the other are none, unless they are chosen, too.
if [ "${QA+x}${CLS+x}" ]; then
    QA=${QA-} CLS=${CLS-}
fi
if [ "${QUICK:-}" ]; then
    LMS=${LMS:-tiny} QA=${QA-toyqa} CLS=${CLS-toycls} SEEDS=${SEEDS:-0} JOBS=${JOBS:-2} OUT=${OUT:-runs/quick}
    # So few validation examples tie in accuracy; a tie is no reward.
    NMG_FLAGS=${NMG_FLAGS:---episodes=2 --explore=1 --contexts=240 --docs=20 --metric=likelihood}
fi
SEEDS=${SEEDS:-0 1 2} JOBS=${JOBS:-1} OUT=${OUT:-runs/tables} PYTHON=${PYTHON:-python}
QA=${QA-squad emrqa newsqa} CLS=${CLS-chemprot imdb}
policies=() rows=() finished=0
fail() { echo "error: $*" >&2; exit 2; }
[[ -z $* || $* == --list ]] || fail "$*: give --list or nothing; all else are environment variables"
[[ "$OUT$PYTHON$here" != *[[:space:]]* ]] || fail "OUT, PYTHON and this path must be without spaces"

# WORD ...: a checksum of the words; of a path, of what its files hold, so that they may lie elsewhere later
checksum() {
    for word; do
        [ -e "$word" ] || echo "$word"
        [ ! -e "$word" ] || find -L "$word" -type f -print0 | sort -z | xargs -0 cat
    done | cksum | cut -d " " -f 1
}

# SCRIPT DATASET LM MASKER[,--flag=value,...]: a row of a table, all seeds but for those in the results
row() {
    local script=$1 data=$2 base=$3 row=$4 name=${4%%,*}
    local masker=$name read=--dataset=$data place=$(basename $data)-$(basename $base)
    local files=$(checksum "$data" "$base") learn="" policy flags before after key run pretrain lm

    # What its masker learns, once for all seeds.
    case $name in
        nmg) learn="train_nmg.py $NMG_FLAGS" masker=nmg ;;
        nmg-alone) learn="train_nmg.py $NMG_FLAGS --self_play=False" masker=nmg ;;
        nmg-fresh) learn="train_nmg.py $NMG_FLAGS --continual=False" masker=nmg ;;
        search | sampled) learn="search_masks.py $SEARCH_FLAGS" ;;
    esac
    if [ "$learn" ]; then
        masker+=:$OUT/policy-$place-$(checksum "$files $learn")
        policy="$PYTHON $here$learn $read --lm=$base --out=${masker#*:}"
    fi

    # No pre-training depends on no flags of it.
    [ $name = none ] || flags="$PRETRAIN_FLAGS $(tr "," " " <<< ${row#"$name"})"
    for seed in $SEEDS; do
        # A row is found again by its words, and by the file in its masker: FILE.py:function or KIND:FOLDER.
        before=${name%:*} after=${name#*:}
        key=$(checksum "$script $row $learn $files $seed $flags : $FINETUNE_FLAGS" "$before" "$after")
        if grep -qs "\"key\": \"$key\"" "$OUT/results.jsonl"; then
            finished=$((finished + 1))
            continue
        fi
        [[ -z $learn || " ${policies[*]} " == *" $policy "* ]] || policies+=("$policy")
        # With other flags it is another row, in another folder.
        run=$place-$(tr ":/" "-" <<< ${row//,--/-})-$seed-$key lm=$base pretrain=""
        if [ $name != none ]; then
            lm=$OUT/pretrain-$run
            pretrain="$PYTHON ${here}pretrain.py $read --lm=$base --masker=$masker --seed=$seed $flags"
            pretrain+=" --out=$lm && "
        fi
        rows+=("$pretrain$PYTHON $here$script $read --lm=$lm --seed=$seed $FINETUNE_FLAGS --row=$row --key=$key \
                --results=$OUT/results.jsonl --out=$OUT/score-$run")
    done
}

# ---------------------------------------------------------------- table 1: question answering, EM / F1
for lm in ${LMS:-bert-base-uncased distilbert-base-uncased}; do
    for data in $QA; do
        for masker in ${MASKERS:-none random whole span entity punct nmg}; do
            row finetune_qa.py $data $lm $masker
        done
    done
done

# ---------------------------------------------------------------- table 2: classification, accuracy
for lm in ${LMS:-bert-base-uncased}; do
    for data in $CLS; do
        for masker in ${MASKERS:-none random whole span entity punct nmg}; do
            row finetune_cls.py $data $lm $masker
        done
    done
done

# ---------------------------------------------------------------- table 3: ablations, on the last of QA
if [ -z "$MASKERS" ]; then
    for lm in ${LMS:-distilbert-base-uncased}; do
        for data in ${QA##* }; do
            row finetune_qa.py $data $lm nmg-alone
            row finetune_qa.py $data $lm nmg-fresh
        done
    done
fi

# ---------------------------------------------------------------- list them, or run them
if [ "$*" ]; then
    for command in "${policies[@]}" "${rows[@]}"; do
        echo $command
    done
    exit
fi
[ $((${#rows[@]} + finished)) -gt 0 ] || fail "no row is left: check LMS, QA, CLS and MASKERS"
[ $finished = 0 ] || echo "$finished rows are in $OUT/results.jsonl already; for edited code choose another OUT"
echo "what the commands print goes to $OUT/logs"
mkdir -p $OUT/logs
rm -f $OUT/logs/failed

# COMMAND: runs it, with a log of its own, named like what it makes
run_one() {
    local name=$(basename ${1##*--out=})
    local log=$OUT/logs/$name.log
    echo "$(date +%T) $name begins"
    echo "$1" >> $log
    if eval "$1" >> $log 2>&1; then
        echo "$(date +%T) $name ends"
    else
        echo "$name FAILED ($?), see $log: $(tail -n 1 $log)" | tee -a $OUT/logs/failed >&2
    fi
}
# COMMAND ...: runs them all, $JOBS at once
run_each() { [ $# = 0 ] || printf '%s\0' "$@" | xargs -0 -n 1 -P $JOBS bash -c 'run_one "$0"'; }
export -f run_one
export OUT

# By itself each of several would take all cores.
threads=$(($(getconf _NPROCESSORS_ONLN) / JOBS))
[ $JOBS = 1 ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# Policies first, as rows mask with them; a row without its policy fails by itself.
run_each "${policies[@]}"
run_each "${rows[@]}"

code=0
[ ! -s $OUT/results.jsonl ] || $PYTHON ${here}report.py --results=$OUT/results.jsonl || code=$?
# Last, where one looks first.
if [ -e $OUT/logs/failed ]; then
    echo >&2
    echo "$(grep -c "" $OUT/logs/failed) failed; the same command runs them again:" >&2
    cat $OUT/logs/failed >&2
    code=1
fi
exit $code
