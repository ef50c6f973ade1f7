#!/usr/bin/env bash
# Every row of the paper's tables across seeds: one command a row, then report.py.
#
#   bash run_all.sh                     all rows; started again, it goes on where it stopped
#   QUICK=1 bash run_all.sh             the same rows on the embedded data and LM, no download, minutes
#   bash run_all.sh --list              prints the commands for a scheduler; those of train_nmg.py must end first
#
# Choose with environment variables, lists with spaces between:
#   LMS="distilbert-base-uncased" DATASETS="newsqa" MASKERS="none random nmg" SEEDS="0 1 2" JOBS=2
#   MASKERS has two more names: nmg-alone and nmg-fresh, the ablations of table 3
#   QA, CLS        other data sets of each task (names or paths)       SPACY_MODEL   finds named entities
#   RAW=FOLDER     FOLDER/NAME has the raw files of a named data set   OUT=runs      where everything goes
#   PRETRAIN_FLAGS, FINETUNE_FLAGS, NMG_FLAGS    more flags for every pretrain.py, finetune_*.py, train_nmg.py
#
# shellcheck disable=SC2016,SC2086,SC2329   # names have no spaces; xargs calls `job`
set -eo pipefail
cd "$(dirname "$0")"
if [ "${QUICK:-}" ]; then
    LMS=${LMS:-tiny} QA=${QA-toyqa} CLS=${CLS-toycls} SEEDS=${SEEDS:-0} JOBS=${JOBS:-2} OUT=${OUT:-runs/quick}
    quick="--episodes=2 --explore=1 --contexts=240 --docs=20"
    NMG_FLAGS=${NMG_FLAGS:-$quick}
fi
SEEDS=${SEEDS:-0 1 2} JOBS=${JOBS:-1} OUT=${OUT:-runs/tables} PYTHON=${PYTHON:-python}
QA=${QA-squad emrqa newsqa} CLS=${CLS-chemprot imdb}
policies=() rows=()
fail() { echo "error: $*" >&2; exit 2; }
[[ "$OUT$RAW$PYTHON" != *[[:space:]]* ]] || fail "OUT, RAW and PYTHON must be without spaces"

# DATASET NAME: whether both were chosen
chosen() { [[ (-z $DATASETS || " $DATASETS " == *" $1 "*) && (-z $MASKERS || " $MASKERS " == *" $2 "*) ]]; }
raw() { [[ -z $RAW || ! -d $RAW/$1 ]] || echo "--raw=$RAW/$1"; }

# DATASET LM NAME [flags]: meta-trains the policy that the rows of this name use
policy() {
    chosen $1 $3 || return 0
    policies+=("$PYTHON train_nmg.py --dataset=$1 --lm=$2 $(raw $1) $NMG_FLAGS ${*:4} \
                --out=$OUT/$3-$(basename $1)-$(basename $2)")
}

# SCRIPT DATASET LM MASKER: a row of a table, all seeds
row() {
    chosen $2 $4 || return 0
    local lm=$3 masker=$4 pretrain="" run seed
    [[ $4 != nmg* ]] || masker=nmg:$OUT/$4-$(basename $2)-$(basename $3)
    [[ $4 != entity || -z $SPACY_MODEL ]] || masker="entity --spacy_model=$SPACY_MODEL"
    for seed in $SEEDS; do
        run=$(basename $2)-$(basename $3)-$4-$seed
        if [ $4 != none ]; then
            lm=$OUT/pretrain-$run
            pretrain="$PYTHON pretrain.py --dataset=$2 --lm=$3 --masker=$masker --seed=$seed $(raw $2)"
            pretrain+=" $PRETRAIN_FLAGS --out=$lm && "
        fi
        rows+=("$pretrain$PYTHON $1 --dataset=$2 --lm=$lm --seed=$seed $(raw $2) $FINETUNE_FLAGS \
                --results=$OUT/results.jsonl --out=$OUT/score-$run")
    done
}

# ---------------------------------------------------------------- table 1: question answering, EM / F1
for lm in ${LMS:-bert-base-uncased distilbert-base-uncased}; do
    for data in $QA; do
        policy $data $lm nmg --self_play=True --continual=True
        row finetune_qa.py $data $lm none
        row finetune_qa.py $data $lm random
        row finetune_qa.py $data $lm whole
        row finetune_qa.py $data $lm span
        row finetune_qa.py $data $lm entity
        row finetune_qa.py $data $lm punct
        row finetune_qa.py $data $lm nmg
    done
done

# ---------------------------------------------------------------- table 2: classification, accuracy
for lm in ${LMS:-bert-base-uncased}; do
    for data in $CLS; do
        policy $data $lm nmg --self_play=True --continual=True
        row finetune_cls.py $data $lm none
        row finetune_cls.py $data $lm random
        row finetune_cls.py $data $lm whole
        row finetune_cls.py $data $lm span
        row finetune_cls.py $data $lm entity
        row finetune_cls.py $data $lm punct
        row finetune_cls.py $data $lm nmg
    done
done

# ---------------------------------------------------------------- table 3: ablations, the last of the QA data sets
for lm in ${LMS:-distilbert-base-uncased}; do
    for data in ${QA##* }; do
        policy $data $lm nmg-alone --self_play=False --continual=True
        policy $data $lm nmg-fresh --self_play=True --continual=False
        row finetune_qa.py $data $lm nmg-alone
        row finetune_qa.py $data $lm nmg-fresh
    done
done

# ---------------------------------------------------------------- run them
if [ "$*" = --list ]; then
    for command in "${policies[@]}" "${rows[@]}"; do echo $command; done
    exit
fi
[ $# = 0 ] || fail "$*: run_all.sh takes --list or nothing; all else are environment variables"
[ ${#rows[@]} -gt 0 ] || fail "no row is left: check LMS, DATASETS and MASKERS"
mkdir -p "$OUT/logs"
rm -f "$OUT/failed"
export OUT OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( ($(getconf _NPROCESSORS_ONLN) + JOBS - 1) / JOBS ))}

# COMMAND: runs it. What is finished is not run again: the scripts see to that.
job() {
    local log=$OUT/logs/${1##*/}.log policy=${1#*--masker=nmg:} ended=0
    # Where a policy failed, its folder may hold an older one, of other flags.
    if grep -qsF -- "--out=${policy%% *} FAILED" "$OUT/failed"; then
        echo $1 NOT STARTED, as its policy failed | tee -a "$OUT/failed" >&2
        return
    fi
    echo "$(date +%H:%M:%S)" $1
    bash -c "$1" >> "$log" 2>&1 || ended=$?
    [ $ended = 0 ] || echo $1 "FAILED ($ended), see $log" | tee -a "$OUT/failed" >&2
}
export -f job

# COMMAND ...: JOBS of them at once, in a process group of their own, which Ctrl-C and SIGTERM stop as a whole.
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
$PYTHON report.py --results="$OUT/results.jsonl" --out="$OUT/report" || reported=$?
[ -s "$OUT/failed" ] || exit $reported
printf '\n%s failed; the same command runs them again:\n' "$(wc -l < "$OUT/failed")" >&2
cat "$OUT/failed" >&2
exit 1
