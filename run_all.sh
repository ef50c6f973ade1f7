#!/usr/bin/env bash
# Every row of the paper's tables across seeds: one command a row, then report.py.
#
#   bash run_all.sh                     all rows, one after another; started again, it goes on where it stopped
#   QUICK=1 bash run_all.sh             the same rows on the embedded data and LM, no download, minutes
#   bash run_all.sh --list              prints the commands, one a line, for any scheduler; those of train_nmg.py must end first
#
# Choose with environment variables, lists with spaces between:
#   LMS="distilbert-base-uncased" DATASETS="newsqa" MASKERS="none random nmg" SEEDS="0 1 2" JOBS=2
#   MASKERS has two more names: nmg-alone and nmg-fresh, the ablations of table 3
#   QA, CLS           other data sets of each task (names or paths)            SPACY_MODEL   finds named entities
#   RAW=FOLDER        FOLDER/NAME has the raw files of a named data set        OUT=runs      where everything goes
#   PRETRAIN_FLAGS, FINETUNE_FLAGS, NMG_FLAGS    more knobs for every pretrain.py, finetune_*.py, train_nmg.py
set -euo pipefail
cd "$(dirname "$0")"
if [ "${QUICK:-}" ]; then
    LMS=${LMS:-tiny} QA=${QA-toyqa} CLS=${CLS-toycls} SEEDS=${SEEDS:-0} JOBS=${JOBS:-2} OUT=${OUT:-runs/quick}
    NMG_FLAGS=${NMG_FLAGS:---episodes=2 --explore=1 --contexts=240 --docs=20 --credit=play --alpha=0.01 --compare=0}
fi
SEEDS=${SEEDS:-0 1 2} JOBS=${JOBS:-1} OUT=${OUT:-runs/tables} PYTHON=${PYTHON:-python}
QA=${QA-squad emrqa newsqa} CLS=${CLS-chemprot imdb}
policies=() rows=()
case "$OUT${RAW:-}$PYTHON" in *[[:space:]]*) echo "error: OUT, RAW and PYTHON must be without spaces" >&2; exit 2;; esac

chosen() { [[ -z "$2" || " $2 " == *" $1 "* ]]; }                  # NAME LIST: whether the list is empty or holds the name
raw() { [ -z "${RAW:-}" ] || [ ! -d "$RAW/$1" ] || echo "--raw=$RAW/$1"; }
name() { local last=${1%/}; echo "${last##*/}"; }

policy() {                                                          # DATASET LM NAME [flags]: meta-trains the policy that row uses
    chosen "$1" "${DATASETS:-}" && chosen "$3" "${MASKERS:-}" || return 0
    policies+=("$PYTHON train_nmg.py --dataset=$1 --lm=$2 $(raw "$1") ${NMG_FLAGS:-} ${*:4} --out=$OUT/$3-$(name "$1")-$(name "$2")")
}

row() {                                                             # SCRIPT DATASET LM MASKER: a row of a table, all seeds
    chosen "$2" "${DATASETS:-}" && chosen "$4" "${MASKERS:-}" || return 0
    local masker=$4 spacy="" lm what
    [[ $4 != nmg* ]] || masker="nmg:$OUT/$4-$(name "$2")-$(name "$3")"
    [[ $4 != entity || -z "${SPACY_MODEL:-}" ]] || spacy="--spacy_model=$SPACY_MODEL"
    for seed in $SEEDS; do
        lm=$3 what=$(name "$2")-$(name "$3")-$4-$seed command=""
        if [ "$4" != none ]; then
            lm=$OUT/pretrain-$what
            command="$PYTHON pretrain.py --dataset=$2 --lm=$3 --masker=$masker --seed=$seed $(raw "$2") $spacy ${PRETRAIN_FLAGS:-} --out=$lm && "
        fi
        rows+=("$command$PYTHON $1 --dataset=$2 --lm=$lm --seed=$seed $(raw "$2") ${FINETUNE_FLAGS:-} --results=$OUT/results.jsonl --out=$OUT/score-$what")
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

# ---------------------------------------------------------------- table 3: ablations, the last of the QA data sets (NewsQA)
for lm in ${LMS:-distilbert-base-uncased}; do
    for data in ${QA##* }; do
        policy $data $lm nmg-alone --self_play=False --continual=True
        policy $data $lm nmg-fresh --self_play=True --continual=False
        row finetune_qa.py $data $lm nmg-alone
        row finetune_qa.py $data $lm nmg-fresh
    done
done

# ---------------------------------------------------------------- run them
if [ "${1:-}" = --list ]; then
    [ ${#rows[@]} = 0 ] || printf '%s\n' ${policies[@]+"${policies[@]}"} "${rows[@]}" | tr -s ' '
    exit
fi
[ $# = 0 ] || { echo "error: $*: run_all.sh takes --list or nothing; all else are environment variables (see its first lines)" >&2; exit 2; }
[ ${#rows[@]} -gt 0 ] || { echo "error: no row is left: check LMS, DATASETS and MASKERS" >&2; exit 2; }
mkdir -p "$OUT/logs"
total=$(( ${#policies[@]} + ${#rows[@]} ))
rm -f "$OUT/failed"
export OUT OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( ($(getconf _NPROCESSORS_ONLN) + JOBS - 1) / JOBS ))}

job() {                                                             # one command; what ended well is kept beside its log and not run again
    local log ended=0
    log=$OUT/logs/$(basename "${1##*--out=}").log
    [ "$(cat "$log.done" 2>/dev/null)" != "$1" ] || { echo "done before: $log"; return 0; }
    echo "$(date +%H:%M:%S) $1"
    bash -c "$1" > "$log" 2>&1 || ended=$?
    if [ $ended = 0 ]; then printf '%s\n' "$1" > "$log.done"; else echo "FAILED ($ended): $1; log: $log" | tee -a "$OUT/failed" >&2; fi
}
export -f job
all() {                                                             # in the background, so that the trap acts at once and no new one starts
    [ $# -gt 0 ] || return 0
    printf '%s\0' "$@" > "$OUT/logs/todo"
    set -m                                                          # a process group of their own, so that all of them can be stopped
    xargs -0 -n 1 -P "$JOBS" "$BASH" -c 'job "$0"' < "$OUT/logs/todo" &
    set +m
    trap "kill -- -$! 2>/dev/null; exit 143" TERM HUP INT
    wait $!
}
all ${policies[@]+"${policies[@]}"}
if [ -s "$OUT/failed" ]; then                                       # the rows of a policy that failed would take one that is not theirs
    left=()
    for row in "${rows[@]}"; do
        policy=${row#*--masker=nmg:} policy=${policy%% *}
        if grep -qF -e " --out=$policy; log" "$OUT/failed"; then echo "NOT STARTED, as its policy failed: $row" | tee -a "$OUT/failed" >&2; else left+=("$row"); fi
    done
    rows=(${left[@]+"${left[@]}"})
fi
all ${rows[@]+"${rows[@]}"}
reported=0
$PYTHON report.py --results="$OUT/results.jsonl" --out="$OUT/report" || reported=$?
if [ -s "$OUT/failed" ]; then
    printf '\n%s of %s commands failed; the same command runs them again:\n' $(wc -l < "$OUT/failed") $total >&2
    cat "$OUT/failed" >&2
    exit 1
fi
exit $reported
