#!/usr/bin/env bash
# Every row of the paper's tables across seeds, or maskers of your choice on your data; then report.py.
#
#   bash run_all.sh                     all rows; started again, it goes on where it stopped
#   QUICK=1 bash run_all.sh             the same rows on the embedded data and LM, no download, minutes
#   CLS=my.csv LMS=roberta-base MASKERS="none random whole tfidf" SEEDS="0 1 2 3 4 5 6 7 8 9" bash run_all.sh
#   bash run_all.sh --list              prints the commands for a scheduler; those that learn must end first
#
# Choose with environment variables, lists with spaces between:
#   MASKERS        any --masker of pretrain.py; nmg (greedy) and search (sampled) are learned first, nmg-alone
#                  and nmg-fresh are the ablations of table 3. Flags of pretrain.py for one row after commas:
#                  random,--p=0.3-0.15
#   LMS, SEEDS                                                         JOBS=2        rows at once
#   QA, CLS        data sets of each task (names or paths)             SPACY_MODEL   finds named entities
#   RAW=FOLDER     FOLDER/NAME has the raw files of a named data set   OUT=runs      where everything goes
#   PRETRAIN_FLAGS, FINETUNE_FLAGS, NMG_FLAGS, SEARCH_FLAGS    more flags for every command of a script
#
# shellcheck disable=SC2016,SC2086,SC2329   # names have no spaces; xargs calls `job`
set -eo pipefail
# Paths are those of where you are; the scripts lie beside this file.
here=${0%run_all.sh}
[[ ! "${here:-.}" -ef . ]] || here=""
# Where only one kind of task is chosen, the data sets of the other are not wanted.
[ -z "${QA+x}${CLS+x}" ] || QA=${QA-} CLS=${CLS-}
if [ "${QUICK:-}" ]; then
    LMS=${LMS:-tiny} QA=${QA-toyqa} CLS=${CLS-toycls} SEEDS=${SEEDS:-0} JOBS=${JOBS:-2} OUT=${OUT:-runs/quick}
    quick="--episodes=2 --explore=1 --contexts=240 --docs=20"
    NMG_FLAGS=${NMG_FLAGS:-$quick}
fi
SEEDS=${SEEDS:-0 1 2} JOBS=${JOBS:-1} OUT=${OUT:-runs/tables} PYTHON=${PYTHON:-python}
QA=${QA-squad emrqa newsqa} CLS=${CLS-chemprot imdb}
policies=() rows=() unread=() finished=0 tried=() files="" files_of=""
fail() { echo "error: $*" >&2; exit 2; }
list=$*
[[ -z $list || $list == --list ]] || fail "$*: give --list or nothing; all else are environment variables"
[[ "$OUT$RAW$PYTHON$here" != *[[:space:]]* ]] || fail "OUT, RAW, PYTHON and this path must be without spaces"

# PATH: a checksum of what a file or a folder holds; nothing of what is no path, such as a name of the hub
sum() { [ ! -e "$1" ] || find -L "$1" -type f -print0 | sort -z | xargs -0 cat | cksum; }

raw() { [[ -z $RAW || ! -d $RAW/$1 ]] || echo "--raw=$RAW/$1"; }

# DATASET LM: prepares the data, once. Where the data or the LM cannot be read, a sentence says why before any
# row runs; they get no rows, and the others go on.
readable() {
    if [[ -z $list && " ${tried[*]} " != *" $1 $2 "* ]]; then
        tried+=("$1 $2")
        $PYTHON ${here}data_prep.py --dataset=$1 --lm=$2 $(raw $1) || unread+=("$1 $2")
    fi
    [[ " ${unread[*]} " != *" $1 $2 "* ]]
}

# SCRIPT DATASET LM MASKER[,--flag=value,...]: a row of a table, all seeds but for those in the results. What
# its masker learns comes first, once, and lies in $OUT/NAME-DATASET-LM.
row() {
    local lm=$3 name=${4%%,*} flags=${4#"${4%%,*}"} learn="" code="" pretrain=""
    local masker folder run key seed command
    # Rows of the same data and LM follow each other: their files, which may be large, are read once.
    [ "$files_of" = "$2 $3" ] || files="$(sum $2) $(sum $3)" files_of="$2 $3"
    masker=$name flags=${flags//,/ } folder=$OUT/$name-$(basename $2)-$(basename $3)
    case $name in
        nmg) learn="train_nmg.py $NMG_FLAGS --self_play=True --continual=True" masker=nmg:$folder ;;
        nmg-alone) learn="train_nmg.py $NMG_FLAGS --self_play=False --continual=True" masker=nmg:$folder ;;
        nmg-fresh) learn="train_nmg.py $NMG_FLAGS --self_play=True --continual=False" masker=nmg:$folder ;;
        search) learn="search_masks.py $SEARCH_FLAGS" masker=sampled:$folder ;;
        entity) [[ -z $SPACY_MODEL ]] || flags+=" --spacy_model=$SPACY_MODEL" ;;
        *.py:*) code=$(sum "${name%:*}") ;;
        *:*) code=$(sum "${name#*:}") ;;
    esac
    for seed in $SEEDS; do
        # What this line is made of, wherever its files lie.
        key="$1 $(basename $2) $(basename $3) $name $flags $learn $code $files $seed"
        key=$(cksum <<< "$key $PRETRAIN_FLAGS : $FINETUNE_FLAGS") key=${key// /-}
        if grep -qs "\"key\": \"$key\"" "$OUT/results.jsonl"; then
            finished=$((finished + 1))
            continue
        fi
        readable $2 $3 || return 0
        command="$PYTHON $here${learn%% *} --dataset=$2 --lm=$3 $(raw $2) ${learn#* } --out=$folder"
        [[ -z $learn || " ${policies[*]} " == *" $command "* ]] || policies+=("$command")
        # With other flags it is another row, in another folder.
        run=$(basename $2)-$(basename $3)-$(tr ":/" "-" <<< ${4//,--/-})-$seed-${key%-*}
        if [ $name != none ]; then
            lm=$OUT/pretrain-$run
            pretrain="$PYTHON ${here}pretrain.py --dataset=$2 --lm=$3 --masker=$masker --seed=$seed $(raw $2)"
            pretrain+=" $PRETRAIN_FLAGS $flags --out=$lm && "
        fi
        rows+=("$pretrain$PYTHON $here$1 --dataset=$2 --lm=$lm --seed=$seed $(raw $2) $FINETUNE_FLAGS \
                --row=$4 --key=$key --results=$OUT/results.jsonl --out=$OUT/score-$run")
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

# ---------------------------------------------------------------- run them
if [ "$list" ]; then
    for command in "${policies[@]}" "${rows[@]}"; do echo $command; done
    exit
fi
[ $((${#rows[@]} + finished + ${#unread[@]})) -gt 0 ] || fail "no row is left: check LMS, QA, CLS and MASKERS"
[ $((${#rows[@]} + finished)) -gt 0 ] || exit 2
[ $finished = 0 ] || echo "$finished rows are in $OUT/results.jsonl already"
mkdir -p "$OUT/logs"
rm -f "$OUT/failed"
[ ${#unread[@]} = 0 ] || printf '%s: cannot be read, see above\n' "${unread[@]}" > "$OUT/failed"
count() { cat "$OUT/results.jsonl" 2> /dev/null | wc -l; }
export OUT ROWS=${#rows[@]} BEFORE=$(count)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( ($(getconf _NPROCESSORS_ONLN) + JOBS - 1) / JOBS ))}

# COMMAND: runs it. What is finished is not run again: the scripts see to that.
job() {
    # Where its results go, and the folder of its policy, if it has one.
    local folder=${1##*--out=} policy=${1#*--masker=*:} ended=0
    local log=$OUT/logs/${folder##*/}.log
    # Where a policy failed, its folder may hold an older one, of other flags.
    if grep -qs "^${policy%% *} FAILED" "$OUT/failed"; then
        echo "$folder NOT STARTED, as its policy failed" | tee -a "$OUT/failed" >&2
        return
    fi
    echo "$(date +%H:%M:%S) $folder begins, see $log"
    echo $1 >> "$log"
    bash -c "$1" >> "$log" 2>&1 || ended=$?
    if [ $ended != 0 ]; then
        echo "$folder FAILED ($ended), see $log: $(tail -n 1 "$log")" | tee -a "$OUT/failed" >&2
    else
        echo "$(date +%H:%M:%S) $folder ends; $(($(count) - BEFORE)) of $ROWS rows are finished"
    fi
}
export -f job count

# COMMAND ...: JOBS of them at once, in a process group, which Ctrl-C and SIGTERM stop as a whole.
all() {
    [ $# -gt 0 ] || return 0
    set -m
    printf '%s\0' "$@" | xargs -0 -n 1 -P "$JOBS" "$BASH" -c 'job "$0"' &
    set +m
    trap 'kill -- -$(jobs -p); exit 143' TERM HUP INT
    wait $!
}
all "${policies[@]}"
all "${rows[@]}"
reported=0
[ ! -e "$OUT/results.jsonl" ] || $PYTHON ${here}report.py --results="$OUT/results.jsonl" || reported=$?
[ -s "$OUT/failed" ] || exit $reported
printf '\n%s failed; the same command runs them again:\n' "$(wc -l < "$OUT/failed")" >&2
cat "$OUT/failed" >&2
exit 1
