#!/usr/bin/env bash
# Every row of the paper's tables across seeds, or maskers of your choice on your data; then report.py.
#
#   bash run_all.sh                     all rows; started again, it goes on where it stopped
#   QUICK=1 bash run_all.sh             the same rows on the embedded data and LM, no download, minutes
#   CLS=my.csv LMS=roberta-base MASKERS="none random whole tfidf" SEEDS="0 1 2 3 4 5 6 7 8 9" bash run_all.sh
#   bash run_all.sh --list              prints what is left, for a scheduler: policies (must end first), rows
#
# What has run.json in its folder is done, and is not run again: other flags, data or code need another OUT.
# Choose with environment variables, lists space-separated:
#   MASKERS        any --masker of pretrain.py; its flags for one row after commas: random,--p=0.3-0.15.
#                  Policies are learned for nmg, nmg-paper (the paper's exact form), nmg-alone and nmg-fresh
#                  (ablations of table 3) and sampled, which draws its tokens from the policy of nmg
#   POLICIES=3     how many are learned for a row; its seeds take turns with them, as policies differ, too
#   QA, CLS        data sets of each task (names or paths)             LMS, SEEDS
#   JOBS=2         commands at once                                    OUT=runs    where everything goes
#   PRETRAIN_FLAGS, FINETUNE_FLAGS, NMG_FLAGS
#                  more flags for every command of a script, such as PRETRAIN_FLAGS=--spacy_model=FOLDER
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
    LMS=${LMS:-tiny} SEEDS=${SEEDS:-0} POLICIES=${POLICIES:-1} JOBS=${JOBS:-2} OUT=${OUT:-runs/quick}
    # With so few validation examples accuracies often tie, and a tie rewards nothing.
    NMG_FLAGS=${NMG_FLAGS:-"--episodes=2 --metric=likelihood"}
fi
SEEDS=${SEEDS:-0 1 2} POLICIES=${POLICIES:-3} JOBS=${JOBS:-1} OUT=${OUT:-runs/tables} PYTHON=${PYTHON:-python}
# In quotes the shell leaves ~ as it is.
OUT=${OUT/#"~/"/$HOME/}
[[ $JOBS:$POLICIES =~ ^[1-9][0-9]*:[1-9][0-9]*$ ]] || fail "JOBS=$JOBS, POLICIES=$POLICIES: must be 1 or more"
[[ "$OUT$PYTHON$here" != *[[:space:]]* ]] || fail "OUT, PYTHON and this path must be without spaces"
# Rows of other flags must not be taken for rows of these.
settings="pretrain: $PRETRAIN_FLAGS; finetune: $FINETUNE_FLAGS; nmg: $NMG_FLAGS; policies: $POLICIES"
before=$(cat $OUT/settings 2> /dev/null || echo "$settings")
[ "$before" = "$settings" ] || fail "$OUT/settings has other flags: choose another OUT, or remove $OUT"

# ---------------------------------------------------------------- the commands
policies=() rows=()

# SCRIPT LMS DATASETS MASKERS: adds what is left to do for a table
table() {
    for lm in $2; do for data in $3; do for row in $4; do for seed in $SEEDS; do
        # A row is MASKER or MASKER,--flag=value,...
        masker=${row%%,*}
        flags=${row#"$masker"}
        # Names keep whole paths, as x/data and y/data are two data sets.
        place=${data//[\/,:]/-}-${lm//[\/,:]/-}
        name=$place-${row//[\/,:]/-}-$seed
        # A row that was killed before its line was written is called again, and adds the line.
        if [ -e $OUT/score-$name/run.json ] && grep -qsF "$OUT/score-$name/" $OUT/results.jsonl; then
            continue
        fi

        # 1. Learn a policy, once for all seeds and rows that share it.
        learn=""
        case $masker in
            nmg | sampled) learn="--continual=True" ;;
            nmg-paper) learn="--continual=True --paper=True --updates_per_episode=10" ;;
            nmg-alone) learn="--continual=True --self_play=False" ;;
            nmg-fresh) learn="--continual=False" ;;
        esac
        if [ "$learn" ]; then
            number=$((seed % POLICIES))
            policy=$OUT/policy-$place-${masker/sampled/nmg}-$number
            masker=${masker%%-*}:$policy
            learn="$PYTHON $here/train_nmg.py --dataset=$data --lm=$lm --seed=$number $NMG_FLAGS \
                $learn --out=$policy"
            [[ -e $policy/run.json || " ${policies[*]} " = *" $learn "* ]] || policies+=("$learn")
        fi

        # 2. Pre-train. Learned maskers mask 5 % in three epochs, as when they were learned. (Not for tiny.)
        learned="" pretrain="" adapted=$lm
        if [[ $masker =~ ^(nmg|sampled): && $lm != tiny ]]; then
            learned="--p=0.05 --epochs=3"
        fi
        if [ $masker != none ]; then
            adapted=$OUT/pretrain-$name
            pretrain="$PYTHON $here/pretrain.py --dataset=$data --lm=$lm --masker=$masker --seed=$seed \
                $learned $PRETRAIN_FLAGS ${flags//,/ } --out=$adapted &&"
        fi

        # 3. Fine-tune.
        rows+=("$pretrain $PYTHON $here/$1 --dataset=$data --lm=$adapted --seed=$seed $FINETUNE_FLAGS \
            --row=$row --results=$OUT/results.jsonl --out=$OUT/score-$name")
    done; done; done; done
}

all="none random whole span entity punct nmg nmg-paper"
# Random masks as few as those of learned maskers, for as many epochs. (Not for tiny.)
[ "$QUICK" ] || all="$all random,--p=0.05,--epochs=3"
# 1: question answering, EM / F1
table finetune_qa.py "${LMS:-bert-base-uncased distilbert-base-uncased}" "$QA" "${MASKERS:-$all}"
# 2: classification, accuracy
table finetune_cls.py "${LMS:-bert-base-uncased}" "$CLS" "${MASKERS:-$all}"
# 3: ablations, on the last of QA
[ "$MASKERS" ] || table finetune_qa.py "${LMS:-distilbert-base-uncased}" "${QA##* }" "nmg-alone nmg-fresh"
if [ "$*" ]; then
    for command in "${policies[@]}" "${rows[@]}"; do
        echo $command
    done
    exit
fi

# ---------------------------------------------------------------- run them
# COMMAND: runs it, with a log of its own, named like what it makes. If it fails, the rest go on.
run_one() {
    name=$(basename ${1##*--out=})
    log=$OUT/logs/$name.log
    echo "$(date +%T) $name"
    echo "$1" > $log
    eval "$1" >> $log 2>&1 ||
        echo "$name FAILED ($?), see $log: $(tail -n 1 $log)" | tee -a $OUT/logs/failed >&2
}
export OUT
export -f run_one

# COMMAND ...: runs them all, JOBS at once. Ctrl-C ends xargs and what it runs.
run_each() {
    [ $# = 0 ] || printf "%s\0" "$@" | xargs -0 -n 1 -P $JOBS bash -c 'run_one "$0"'
}

echo "${#policies[@]} policies and ${#rows[@]} runs are left; what they print goes to $OUT/logs"
mkdir -p $OUT/logs
rm -f $OUT/logs/failed
echo "$settings" > $OUT/settings
# By itself each of several would take all cores.
cores=$(getconf _NPROCESSORS_ONLN)
[ $JOBS = 1 ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > JOBS ? cores / JOBS : 1))}
# A row whose policy failed fails, too.
run_each "${policies[@]}"
run_each "${rows[@]}"

code=0
$PYTHON $here/report.py --results=$OUT/results.jsonl || code=$?
# Printed last, where one looks first: the warnings in the logs and the reasons of failures, with counts.
grep -hs "^WARNING" $OUT/logs/*.log | sort | uniq -c >&2 || true
if [ -e $OUT/logs/failed ]; then
    echo "$(grep -c "" $OUT/logs/failed) failed; the same command runs them again:" >&2
    sed "s/.*, see [^ ]*: //" $OUT/logs/failed | sort | uniq -c >&2
    code=1
fi
exit $code
