#!/usr/bin/env bash
# Every row of the paper's tables across seeds, or maskers of your choice on your data; then report.py. A row
# that fails says so, and the rest go on.
#
#   bash run_all.sh                     all rows; started again, it goes on where it stopped
#   QUICK=1 bash run_all.sh             the same rows on the embedded data and LM, no download, minutes
#   CLS=my.csv LMS=roberta-base MASKERS="none random whole tfidf" SEEDS="0 1 2 3 4 5 6 7 8 9" bash run_all.sh
#   bash run_all.sh --list              prints the commands for a scheduler: policies, which must end first, then rows
#
# Choose with environment variables, lists space-separated:
#   MASKERS        any --masker of pretrain.py; nmg, search and sampled are learned first; nmg-paper is the
#                  paper's exact form, nmg-alone and nmg-fresh are the ablations of table 3. Flags of
#                  pretrain.py for one row after commas: random,--p=0.3-0.15
#   POLICIES=3     how many are learned for a row; its seeds share them, as policies differ, too
#   QA, CLS        data sets of each task (names or paths)             LMS, SEEDS
#   JOBS=2         commands at once                                    OUT=runs    where everything goes
#   PRETRAIN_FLAGS, FINETUNE_FLAGS, NMG_FLAGS, SEARCH_FLAGS
#                  more flags for every command of a script, such as PRETRAIN_FLAGS=--spacy_model=FOLDER; with
#                  other flags the same rows need another OUT, as one table compares equal settings only
#
# shellcheck disable=SC2086       # names have no spaces
set -e
here=$(dirname "$0")
fail() {
    echo "error: $*" >&2
    exit 2
}
[[ -z $* || $* = --list ]] || fail "$*: give --list or nothing; all else are environment variables"

# ---------------------------------------------------------------- what was not chosen
if [ -z "${QA+set}${CLS+set}" ]; then
    # If only one of them is set, the other stays empty.
    QA="squad emrqa newsqa" CLS="chemprot imdb"
    [ -z "$QUICK" ] || QA=toyqa CLS=toycls
fi
if [ "$QUICK" ]; then
    LMS=${LMS:-tiny} SEEDS=${SEEDS:-0} JOBS=${JOBS:-2} OUT=${OUT:-runs/quick}
    # With so few validation examples accuracies often tie, and a tie rewards nothing.
    few="--episodes=2 --metric=likelihood"
    NMG_FLAGS=${NMG_FLAGS:-$few} POLICIES=${POLICIES:-1}
fi
SEEDS=${SEEDS:-0 1 2} POLICIES=${POLICIES:-3} JOBS=${JOBS:-1} OUT=${OUT:-runs/tables} PYTHON=${PYTHON:-python}
[[ $JOBS =~ ^[1-9][0-9]*$ ]] || fail "JOBS=$JOBS: must be 1 or more"
[[ "$OUT$PYTHON$here" != *[[:space:]]* ]] || fail "OUT, PYTHON and this path must be without spaces"

# ---------------------------------------------------------------- the commands of a row
policies=() rows=() finished=0

# WORD ...: a checksum of the words; of a path, of what its files hold, so that they may lie elsewhere later
checksum() {
    for word in "$@"; do
        if [ -e "$word" ]; then
            find -L "$word" -type f -print0 | sort -z | xargs -0 cat
        else
            echo "$word"
        fi
    done | cksum | cut -d " " -f 1
}

# SCRIPT DATASET LM MASKER[,--flag=value,...]: adds a row of a table, all seeds but for those in the results
row() {
    local script=$1 data=$2 base=$3 row=$4 name=${4%%,*}
    local masker learn="" policy="" flags="" pretrain=""
    place=$(basename $data)-$(basename $base)
    files=$(checksum "$data" "$base")

    # What its masker learns.
    case $name in
        nmg) learn="train_nmg.py $NMG_FLAGS --continual=True" ;;
        nmg-paper) learn="train_nmg.py $NMG_FLAGS --continual=True --paper=True --updates_per_episode=10" ;;
        nmg-alone) learn="train_nmg.py $NMG_FLAGS --continual=True --self_play=False" ;;
        nmg-fresh) learn="train_nmg.py $NMG_FLAGS --continual=False" ;;
        search | sampled) learn="search_masks.py $SEARCH_FLAGS" ;;
    esac

    # Without pre-training its flags change nothing.
    if [ $name != none ]; then
        flags="$PRETRAIN_FLAGS $(tr "," " " <<< "${row#"$name"}")"
    fi
    for seed in $SEEDS; do
        # A row is found again by its words, and by the file in its masker: FILE.py:function or KIND:FOLDER.
        words="$script $row $learn ${learn:+$POLICIES} $files $seed $flags : $FINETUNE_FLAGS"
        key=$(checksum "$words" "${name%:*}" "${name#*:}")
        if grep -qs "\"key\": \"$key\"" "$OUT/results.jsonl"; then
            finished=$((finished + 1))
            continue
        fi
        # The seeds of a row take turns with its policies.
        masker=$name
        if [ "$learn" ]; then
            number=$((seed % POLICIES))
            folder=$OUT/policy-$place-$(checksum "$files $learn")-$number
            masker=${name%%-*}:$folder
            policy="$PYTHON $here/$learn --seed=$number --dataset=$data --lm=$base --out=$folder"
        fi
        # Several rows may mask with one policy.
        if [[ $policy && " ${policies[*]} " != *" $policy "* ]]; then
            policies+=("$policy")
        fi
        # With other flags it is another row, in another folder.
        run=$place-${row//[,:\/]/-}-$seed-$key
        adapted=$base
        if [ $name != none ]; then
            adapted=$OUT/pretrain-$run
            pretrain="$PYTHON $here/pretrain.py --dataset=$data --lm=$base --masker=$masker \
                --seed=$seed $flags --out=$adapted &&"
        fi
        rows+=("$pretrain $PYTHON $here/$script --dataset=$data --lm=$adapted --seed=$seed $FINETUNE_FLAGS \
                --row=$row --key=$key --results=$OUT/results.jsonl --out=$OUT/score-$run")
    done
}

# SCRIPT LMS DATASETS MASKERS: adds the rows of a table
table() {
    for lm in $2; do
        for data in $3; do
            for masker in $4; do
                row $1 $data $lm $masker
            done
        done
    done
}

# ---------------------------------------------------------------- the tables of the paper
all="none random whole span entity punct nmg nmg-paper"
# Learned maskers mask 5 % in three epochs; the last row is random masks of that kind. (Not for tiny.)
[ "$QUICK" ] || all="$all random,--p=0.05,--epochs=3"
# 1: question answering, EM / F1
table finetune_qa.py "${LMS:-bert-base-uncased distilbert-base-uncased}" "$QA" "${MASKERS:-$all}"
# 2: classification, accuracy
table finetune_cls.py "${LMS:-bert-base-uncased}" "$CLS" "${MASKERS:-$all}"
# 3: ablations, on the last of QA
[ "$MASKERS" ] || table finetune_qa.py "${LMS:-distilbert-base-uncased}" "${QA##* }" "nmg-alone nmg-fresh"

# ---------------------------------------------------------------- list them, or run them
if [ "$*" ]; then
    for command in "${policies[@]}" "${rows[@]}"; do
        echo $command
    done
    exit
fi
[ $((${#rows[@]} + finished)) -gt 0 ] || fail "no row is left: check LMS, QA, CLS and MASKERS"

# COMMAND: runs it, with a log of its own, named like what it makes
run_one() {
    local name=$(basename ${1##*--out=})
    local log=$OUT/logs/$name.log
    echo "$(date +%T) $name begins"
    echo "$1" > $log
    if eval "$1" >> $log 2>&1; then
        echo "$(date +%T) $name ends"
    else
        echo "$name FAILED ($?), see $log: $(tail -n 1 $log)" | tee -a $OUT/logs/failed >&2
    fi
}

# COMMAND ...: runs them all, JOBS at once
run_each() {
    for command in "$@"; do
        while [ $(jobs -r | wc -l) -ge $JOBS ]; do
            sleep 0.1
        done
        run_one "$command" &
    done
    wait
}
# Ctrl-C ends those at work, too.
trap "kill 0" INT

[ $finished = 0 ] || echo "$finished runs are in $OUT/results.jsonl; for edited code choose another OUT"
echo "what the commands print goes to $OUT/logs"
mkdir -p $OUT/logs
rm -f $OUT/logs/failed
# By itself each of several would take all cores.
cores=$(getconf _NPROCESSORS_ONLN)
[ $JOBS = 1 ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > JOBS ? cores / JOBS : 1))}
# Policies first, as rows mask with them; a row without its policy fails by itself.
run_each "${policies[@]}"
run_each "${rows[@]}"

code=0
[ ! -s $OUT/results.jsonl ] || $PYTHON $here/report.py --results=$OUT/results.jsonl || code=$?
# Printed last, where one looks first: the warnings in the logs and the reasons of failures, with counts.
grep -hs "^WARNING" $OUT/logs/*.log | sort | uniq -c >&2 || true
if [ -e $OUT/logs/failed ]; then
    echo "$(grep -c "" $OUT/logs/failed) failed; the same command runs them again:" >&2
    sed "s/.*, see [^ ]*: //" $OUT/logs/failed | sort | uniq -c >&2
    code=1
fi
exit $code
