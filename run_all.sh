#!/usr/bin/env bash
# Every row of the paper's tables across seeds, or maskers of your choice on your data; then report.py.
#
#   bash run_all.sh                     all rows; started again, it goes on where it stopped
#   QUICK=1 bash run_all.sh             nearly the same rows on the embedded data and LM, minutes
#   CLS=my.csv LMS=roberta-base MASKERS="none random whole long" SEEDS="0 1 2 3 4 5 6 7 8 9" bash run_all.sh
#   bash run_all.sh --list              prints what is left, for a scheduler: policies (must end first), rows;
#                                       and, on stderr, what they cost
#   bash run_all.sh --download          only fetches and prepares the data sets, and fetches the LMs: on a
#                                       login node, for jobs without a network (HF_HUB_OFFLINE=1)
#
# A folder with run.json is finished and is skipped: other flags, data, or code need another OUT.
# Environment variables choose what is run. Lists are separated by spaces:
#   QA, CLS        data sets of each task, names or paths; if only one of the two is set, the other is empty.
#                  Without both QA="squad newsqa" CLS="chemprot imdb"; the paper's emrqa needs an agreement,
#                  and stands before newsqa, as table 3 is made of the last of QA
#   LMS, SEEDS     LMs and seeds. The paper has three seeds, too few for any p below .05; docs/results.md says
#                  what more of them cost
#   MASKERS        any --masker of pretrain.py (nmg: and sampled: with one folder), or a policy to be learned
#                  first: nmg (its most probable tokens are masked), sampled (tokens are drawn from the same
#                  policy), mean (they are drawn from the mean of all POLICIES policies), nmg-paper (the
#                  paper's form), nmg-alone and nmg-fresh (table 3: without self-play; without continual
#                  adaptation), linear (a baseline without an LM, for CLS: tools/linear.py);
#                  MASKER,--flag=value gives flags of pretrain.py to one row: random,--p=0.3
#   POLICIES=3     how many policies a row has, as they differ, too; seed s uses policy s % POLICIES
#   JOBS=1         commands at once; PYTHON=python runs them
#   PROCESSES=1    processes that learn one policy (torchrun): 2 or 3 run plays of an episode at once, also on
#                  one GPU
#   OUT            where everything goes
#   PRETRAIN_FLAGS, FINETUNE_FLAGS, NMG_FLAGS      more flags for every command of that script; the flags of a
#                  row, and those that make a policy nmg-paper, -alone or -fresh, override them.
#                  --text, --label, --doc and --dev_share of FINETUNE_FLAGS are also those of pre-training and
#                  of policies. Unlabelled text beside a file: PRETRAIN_FLAGS=--corpus=FILE

# shellcheck disable=SC2016,SC2086       # lists are split at spaces
# -f: a * in a name is no pattern
set -ef
# In other locales `printf %q` writes é as $'\303\251', which is not looked for below.
[[ $(locale charmap 2> /dev/null) = UTF-8 ]] || export LC_ALL=C.UTF-8
here=$(dirname "$0")
fail() {
    echo "error: $*" >&2
    exit 2
}
if [[ $* = --help || $* = -h ]]; then
    # The comment above.
    awk 'NR == 1 {next} !/^#/ {exit} {print substr($0, 3)}' "$0"
    exit
fi

# ---------------------------------------------------------------- defaults and checks
[[ $QUICK = [01] || -z $QUICK ]] || fail "QUICK=$QUICK: must be 1 or 0"
QUICK=${QUICK#0}
if [ "$QUICK" ]; then
    [ "${QA+set}${CLS+set}" ] || QA=toyqa CLS=toycls
    LMS=${LMS:-tiny} JOBS=${JOBS:-2} OUT=${OUT:-runs/quick}
    # With so few validation examples accuracies often tie, and a tie rewards nothing.
    NMG_FLAGS=${NMG_FLAGS:-"--episodes=2 --metric=likelihood"}
fi
[ "${QA+set}${CLS+set}" ] || QA="squad newsqa" CLS="chemprot imdb"
SEEDS=${SEEDS:-0 1 2} POLICIES=${POLICIES:-3} JOBS=${JOBS:-1} OUT=${OUT:-runs/tables} PYTHON=${PYTHON:-python}
PROCESSES=${PROCESSES:-1}

[[ -z $* || $* = --list || $* = --download ]] ||
    fail "$*: give --list, --download, --help or nothing; all else are environment variables"
[[ $JOBS:$POLICIES =~ ^[1-9][0-9]*:[1-9][0-9]*$ ]] || fail "JOBS=$JOBS, POLICIES=$POLICIES: must be 1 or more"
[[ $PROCESSES = [1-3] ]] || fail "PROCESSES=$PROCESSES: must be 1, 2 or 3, as there are three plays"
for name in DATASET LM MASKER SEED PRETRAIN_FLAG FINETUNE_FLAG NMG_FLAG; do
    [ -z "${!name}" ] || fail "$name=${!name}: is not read; bash run_all.sh --help names what is"
done
[[ $SEEDS != *[!0-9[:space:]]* && $SEEDS = *[0-9]* ]] || fail "SEEDS=$SEEDS: must be numbers: 0 1 2"
[[ ! " $MASKERS" =~ [[:space:]],|,[^-]|,$ ]] ||
    fail "MASKERS=$MASKERS: must be like none random,--p=0.3 whole"
for list in "$QA" "$CLS" "$LMS"; do
    [[ $list != *[[:space:]]* || ! -e $list ]] || fail "$list: names in lists must be without spaces"
done
[[ $OUT$PYTHON$here != *[[:space:]~]* ]] || fail "OUT, PYTHON and this path must be without spaces or ~"
[[ $OUT != *,* ]] || fail "OUT=$OUT: must be without a comma, which separates the folders of policies"

all="none random whole span entity punct nmg sampled nmg-paper"
# A control for learned maskers: random masks as few as theirs, for as many epochs.
[ "$QUICK" ] || all="$all random,--p=0.05,--epochs=3"
rows=(${MASKERS:-$all})
registered=$(awk '/^@register/ {on = 1} on && /^def / {print $2; on = 0}' $here/maskers.py | sed 's/(.*//')
for row in "${rows[@]}"; do
    masker=${row%%,*}
    # A name without : is a function of maskers.py, or a policy to be learned.
    case $masker in
        nmg | sampled | mean | nmg-paper | nmg-alone | nmg-fresh | linear) ;;
        *.py:*) [[ -e ${masker%:*} || $1 ]] || fail "MASKERS=$masker: no such file: ${masker%:*}" ;;
        *:*) ;;
        *) grep -qxF -- "$masker" <<< "$registered" || fail "MASKERS=$masker: no such masker. Allowed:" \
            "linear nmg sampled mean nmg-paper nmg-alone nmg-fresh FILE.py:function nmg:FOLDER" \
            "sampled:FOLDER" $registered ;;
    esac
done
shared=$(printf "%s\n" "${rows[@]}" | sort -u | tr "/,:" "-" | sort | uniq -d)
[ -z "$shared" ] || fail "MASKERS=$MASKERS: two rows would share the folders *-$shared-*; rename one's files"
for name in PRETRAIN_FLAGS FINETUNE_FLAGS NMG_FLAGS; do
    [[ ${!name} =~ ^[[:space:]]*(--|$) ]] || fail "$name=${!name}: flags begin with --"
done
# NAME FLAGS SCRIPT...: ends if a flag is a field of none of the scripts. (Rows would say so, but only after
# the hours of the policies.)
known() {
    local where=$1 flags=$2 flag name
    shift 2
    for flag in $(grep -aoE -e "(^|\s)--[[:alnum:]_-]+" <<< "$flags"); do
        name=${flag#--}
        case ${name//-/_} in dataset | lm | masker | seed | results | row | out)
            fail "$where=$flags: this script sets $flag itself (QA, CLS, LMS, MASKERS, SEEDS, OUT)" ;;
        esac
        (cd "$here" && grep -qE "^    ${name//-/_}: " "$@" support/sources.py) ||
            fail "$where=$flags: $flag is no flag of $1; its --help lists them"
    done
}
known PRETRAIN_FLAGS "$PRETRAIN_FLAGS" pretrain.py
[ -z "$CLS" ] || known FINETUNE_FLAGS "$FINETUNE_FLAGS" finetune_cls.py finetune.py
[ -z "$QA" ] || known FINETUNE_FLAGS "$FINETUNE_FLAGS" finetune_qa.py finetune.py
known NMG_FLAGS "$NMG_FLAGS" train_nmg.py
for row in "${rows[@]}"; do known MASKERS "${row//,/ }" pretrain.py; done
qa_lms=${LMS:-bert-base-uncased distilbert-base-uncased} cls_lms=${LMS:-bert-base-uncased}

# NAME: as it is, or its beginning and a checksum, where a file could not be called like this
short() {
    local name=$1
    # In bytes, of which a letter has up to four.
    [ "$(printf %s "$name" | wc -c)" -le 200 ] || name=${name:0:45}-$(cksum <<< "$name" | cut -d " " -f 1)
    echo "$name"
}
# DATASET LM: both in the name of a folder. Whole paths, with - for /, as x/data and y/data are two data sets
place_of() {
    local name="$1-$2"
    short "${name//[\/,:]/-}"
}
# LMS DATASETS: the place of each pair, and the pair
places() {
    for lm in $1; do for data in $2; do
        printf "%s\t%s\n" "$(place_of "$data" "$lm")" "$data $lm"
    done; done
}
shared=$({ places "$qa_lms" "$QA"; places "$cls_lms" "$CLS"; } | sort -u | cut -f 1 | uniq -d)
[ -z "$shared" ] || fail "two pairs of data and LM would share the folders *-$shared-*; give one another path"

# FLAGS NAMES: prints the flags of these names (a regular expression), with their values
flags_named() { grep -aoE -e "--($2)(=|\s+)\S+" <<< "$1" || true; }
# The columns of data, what is cut from them, what is scored, and a corpus
columns=$(flags_named "$FINETUNE_FLAGS" "text|label|doc")
cut=$(flags_named "$FINETUNE_FLAGS" "dev[_-]share")
split=$(flags_named "$FINETUNE_FLAGS" split)
corpus=$(flags_named "$PRETRAIN_FLAGS" corpus)
# KIND LM DATASET: prepares a data set as its rows read it, or ends with the reason why it cannot
prepare() { $PYTHON $here/data_prep.py "--dataset=$3" "--lm=$2" --kind=$1 $columns $cut $split $corpus; }

if [ "$1" = --download ]; then
    fetch_lm='import sys
from support.models import load_lm
from support.runs import UserError
try:
    load_lm(sys.argv[1])
except UserError as e:
    sys.exit(f"error: {e}")'
    # KIND LMS DATASETS: fetches what can be fetched
    download() {
        for lm in $2; do
            for data in $3; do
                prepare $1 "$lm" "$data" || status=2
            done
            # data_prep.py has fetched the tokenizer only.
            [ -z "$3" ] || PYTHONPATH=$here $PYTHON -c "$fetch_lm" "$lm" || status=2
        done
    }
    download qa "$qa_lms" "$QA"
    download cls "$cls_lms" "$CLS"
    # The model that finds named entities
    [[ " ${rows[*]}" != *" entity"* ]] || $PYTHON -m spacy download en_core_web_sm || status=2
    exit ${status:-0}
fi

settings="pretrain: $PRETRAIN_FLAGS; finetune: $FINETUNE_FLAGS; nmg: $NMG_FLAGS; policies: $POLICIES"
mkdir -p $OUT/logs || exit 2
# Commands inherit descriptor 9, and so they hold the lock, too, if this script alone is killed. (macOS has
# no flock.)
if [ -z "$1" ] && command -v flock > /dev/null; then
    exec 9> $OUT/logs/.lock
    flock -n 9 || fail "OUT=$OUT: another run_all.sh is at work there, or commands that a killed one left;" \
        "wait for them, end them, or choose another OUT"
fi
# Settings may change until the first run has a folder.
ls $OUT | grep -qE "^(policy|pretrain|score)-" || echo "$settings" > $OUT/settings
[ "$(cat $OUT/settings)" = "$settings" ] ||
    fail "$OUT/settings has other flags: choose another OUT, or remove $OUT"

# ---------------------------------------------------------------- the commands
# WORD...: prints them as a shell reads them, so that no name of a file is taken for code
quoted() {
    local words
    printf -v words " %q" "$@"
    words=${words//\\,/,}                       # a comma needs no \, and many rows have one
    echo "${words# }"
}
torchrun=""
[ $PROCESSES = 1 ] || torchrun="-m torch.distributed.run --standalone --nproc_per_node=$PROCESSES"
# SCRIPT LMS DATASETS MASKERS: prints the shell commands that are left to do for a table, one a line; `run`
# runs them later
table() {
    for lm in $2; do for data in $3; do for row in $4; do for seed in $SEEDS; do
        # A row is MASKER or MASKER,--flag=value,...
        masker=${row%%,*}
        flags=${row#"$masker"}
        script=$1
        if [ $masker = linear ]; then
            [ $1 = finetune_cls.py ] || continue
            script=tools/linear.py
        fi
        place=$(place_of "$data" "$lm")
        name=$(short "$place-${row//[\/,:]/-}-$seed")
        # Finished are those that have also added their line of results.
        if [ -e $OUT/score-$name/run.json ] && grep -qsF "score-$name/" $OUT/results.jsonl; then
            continue
        fi

        # 1. Learn a policy. Rows and seeds that share it print the same command.
        learn="" learned_as=$masker episodes=--episodes=200
        numbers=$((10#$seed % POLICIES))            # 10#: 08 is a number, too
        case $masker in
            nmg) episodes="" ;;
            sampled) learned_as=nmg episodes="" ;;
            mean) learned_as=nmg episodes="" numbers=$(seq -s " " 0 $((POLICIES - 1))) ;;
            nmg-paper) learn="--paper=True --continual=True" ;;
            nmg-alone) learn="--paper=True --continual=True --self_play=False" ;;
            nmg-fresh) learn="--paper=True --continual=False" ;;
            *) learned_as="" ;;
        esac
        if [ "$learned_as" ]; then
            policies=""
            for number in $numbers; do
                policy=$OUT/policy-$place-$learned_as-$number
                [ -e $policy/run.json ] || quoted $PYTHON $torchrun $here/train_nmg.py --dataset=$data \
                    --lm=$lm --seed=$number $episodes $columns $cut $NMG_FLAGS $learn --out=$policy
                policies=$policies,$policy
            done
            # The --masker of nmg and nmg-... is nmg:FOLDER, that of sampled and mean is sampled:FOLDER,...
            masker=${masker/mean/sampled}
            masker=${masker%%-*}:${policies#,}
        fi

        # 2. Pre-train. Learned maskers mask 5 % in three epochs, as when they were learned. (With tiny the
        # toy world's own values serve all rows.)
        as_learned=""
        if [[ $masker =~ ^(nmg|sampled): && $lm != tiny ]]; then
            as_learned="--p=0.05 --epochs=3"
        fi
        adapted=$OUT/pretrain-$name
        pretrain="$(quoted $PYTHON $here/pretrain.py --dataset=$data --lm=$lm --masker=$masker --seed=$seed \
            $as_learned $columns $cut $PRETRAIN_FLAGS ${flags//,/ } --out=$adapted) && "
        [[ $masker != none && $masker != linear ]] || pretrain="" adapted=$lm

        # 3. Fine-tune and score.
        echo "$pretrain$(quoted $PYTHON $here/$script --dataset=$data --lm=$adapted --seed=$seed \
            --save_model=False $FINETUNE_FLAGS --row=$row --results=$OUT/results.jsonl \
            --out=$OUT/score-$name)"
    done; done; done; done
}

# 1: question answering, EM / F1; 2: classification, accuracy; 3: ablations, on the last of QA. Each command
# once: a policy is listed by each row that needs it.
commands=$({
    table finetune_qa.py "$qa_lms" "$QA" "${rows[*]}"
    table finetune_cls.py "$cls_lms" "$CLS" "${rows[*]}"
    [ "$MASKERS" ] || table finetune_qa.py "${LMS:-distilbert-base-uncased}" "${QA##* }" "nmg-alone nmg-fresh"
} | awk '!seen[$0]++')
# Patterns of the commands that learn a policy, and of those that score a row.
learns="/train_nmg.py --dataset=" scores=" --row="
# LEARNS or SCORES: prints these commands
left() { grep -e "$1" <<< "$commands" || true; }

# ---------------------------------------------------------------- what will be run, and what it costs
n_seeds=$(wc -w <<< "$SEEDS")
# A sign-flip test of so many rows against random needs 2 / 2^seeds <= .05 / rows (report.py).
least=1
while [[ " ${rows[*]} " = *" random "* ]] && ((2**least < 40 * (${#rows[@]} - 1))); do
    least=$((least + 1))
done
{
    echo "question answering: ${QA:-nothing (QA is ${QA+empty}${QA-not set})};" \
        "classification: ${CLS:-nothing (CLS is ${CLS+empty}${CLS-not set})}; rows: ${rows[*]}"
    [ $n_seeds -ge $least ] || echo "$n_seeds seeds can show nothing: a comparison of ${#rows[@]} rows" \
        "needs $least (docs/results.md says what they cost)"
    n_policies=$(for seed in $SEEDS; do echo $((10#$seed % POLICIES)); done | sort -u | wc -l)
    [ $n_seeds -le $n_policies ] || [ -z "$(left "$learns")" ] ||
        echo "policies behind $n_seeds seeds: $n_policies; nothing will be claimed of learned masks"
    $PYTHON $here/tools/cost.py <<< "$commands"
} >&2
if [ "$1" ]; then
    left "$learns"
    left "$scores"
    exit
fi

# ---------------------------------------------------------------- run them
# Each of several commands would by itself take all cores.
cores=$(getconf _NPROCESSORS_ONLN)
[ $JOBS = 1 ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > JOBS ? cores / JOBS : 1))}
export OUT

# KIND TOTAL: runs the commands that it reads, each with a log named like what it makes, and says how far it
# is. If one fails, the rest go on.
run() {
    export kind=$1 total=$2 began=$(date +%s)
    : > $OUT/logs/ended                         # a line for each command that has ended
    number=0
    while IFS= read -r command; do
        number=$((number + 1))
        printf "%s\0" $number "$command"
    done | xargs -0 -r -n 2 -P $JOBS bash -c '
        log=$OUT/logs/$(basename "${2##*--out=}").log
        ended=$(wc -l < "$OUT/logs/ended")
        left=""
        if [ $ended -gt 0 ]; then
            minutes=$((($(date +%s) - began) * (total - ended) / ended / 60))
            left=", about $minutes min left"
            [ $minutes -lt 120 ] || left=", about $((minutes / 60)) h left"
        fi
        echo "$(date +%T) $kind $1 of $total$left: $log"
        echo "$2" > "$log"
        eval "$2" >> "$log" 2>&1 ||
            echo "FAILED ($?): $log: $(tail -n 1 "$log")" | tee -a "$OUT/logs/failed" >&2
        echo >> "$OUT/logs/ended"' "$0"
}
# LEARNS or SCORES, KIND: runs these commands in a process group of their own (set -m), so that Ctrl-C,
# SIGTERM and a closed terminal end all of them with this script.
run_left() {
    set -m
    left "$1" | run $2 "$(left "$1" | wc -l)" &
    set +m
    trap "kill -- -$(jobs -p); exit 130" INT TERM HUP
    wait
    trap - INT TERM HUP
}
rm -f $OUT/logs/failed
# KIND LMS DATASETS: prepares what is needed. A data set that cannot be read is said once, and its rows are
# skipped.
check() {
    for lm in $2; do for data in $3; do
        given="$(quoted --dataset=$data --lm=$lm) "
        grep -qF -e "$given" <<< "$commands" || continue
        log=$OUT/logs/data-$(place_of "$data" "$lm").log
        echo "$(date +%T) reading $given" | tee $log
        prepare $1 "$lm" "$data" >> $log 2>&1 && continue
        echo "FAILED ($?): $log, and all rows of these data: $(tail -n 1 $log)" | tee -a $OUT/logs/failed >&2
        commands=$(grep -vF -e "$given" <<< "$commands" || true)
    done; done
}
check qa "$qa_lms" "$QA"
check cls "$cls_lms" "$CLS"
echo "$(left "$learns" | wc -l) policies and $(left "$scores" | wc -l) rows are left"
# Policies first, as rows mask with them.
run_left "$learns" policy
run_left "$scores" row
# LMS DATASETS: where policy 0 of `nmg` was learned, a page and a table of what it masks beside random masks,
# 5 % as when it was learned, and, where spaCy's model is installed, the paper's picture of parts of speech
show_masks() {
    tags=""
    ! $PYTHON -c "import en_core_web_sm" 2> /dev/null || tags=--spacy_model=en_core_web_sm
    for lm in $1; do for data in $2; do
        place=$(place_of "$data" "$lm")
        policy=$OUT/policy-$place-nmg-0 masks=$OUT/masks-$place log=$OUT/logs/masks-$place.log
        [[ -e $policy/run.json && ! -e $masks/preferences.csv ]] || continue
        echo "$(date +%T) what a policy masks: $masks"
        PYTHONPATH=$here $PYTHON -m tools.show_masks "--dataset=$data" "--lm=$lm" $columns $tags --p=0.05 \
            --maskers=random,sampled:$policy --out=$masks > $log 2>&1 ||
            echo "FAILED ($?): $log: $(tail -n 1 $log)" | tee -a $OUT/logs/failed >&2
    done; done
}
show_masks "$qa_lms" "$QA"
show_masks "$cls_lms" "$CLS"
# Tables, also as the paper prints them, and pictures, whose names stand in its last line.
$PYTHON $here/report.py --results=$OUT/results.jsonl --paper=True ||
    echo "FAILED: report.py" >> $OUT/logs/failed
# Printed last, where one looks first: each warning in the logs, once for all rows of a table, and what
# failed. (A log begins with its command.)
find $OUT/logs -name "*.log" -exec awk '
    FNR == 1 {match($0, /--dataset=[^ ]* --lm=[^ ]*/); table = substr($0, RSTART, RLENGTH)}
    /^WARNING/ {count[$0 " (" table]++}
    END {for (warning in count) print warning ", " count[warning] " times)"}' {} + | sort >&2
if [ -e $OUT/logs/failed ]; then
    echo "the same command runs these again:" >&2
    cat $OUT/logs/failed >&2
    exit 1
fi
