#!/usr/bin/env bash
# The whole pipeline: conversations -> hidden states -> vocabulary map -> draft -> served check.
#
#   ./run_pipeline.sh --smoke                       embedded target and conversations, 10 samples, minutes on a laptop
#   ./run_pipeline.sh --model-path M [options]      your target; default dataset mlabonne/open-perfectblend
#
#   --config FILE        settings of a run (configs/pipelines/*.env); the command line wins over it
#   --model-path M       target: model directory, hub name, or `embedded`
#   --dataset D          as stage 01 takes it (hub name, file, folder, self), or `embedded`
#   --output-dir OUT     where all artifacts go (default output/<name of the target>)
#   --max-samples N      samples to prepare
#   --from S, --to S     first and last stage to run: 01 02 03 04 check
#   --trust-remote-code  passed to every stage that loads tokenizer or model
#
# Each stage logs to OUT/logs/. The same command after an interruption continues where it stopped. A kill -9 of this
# script alone lets the running stage finish; its lock, with its process id, keeps a second one out meanwhile.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
stages=(01 02 03 04 check)

fail() {
  printf 'run_pipeline.sh: %s\n' "$*" >&2
  exit 2
}

# ------------------------------------------------------------------------------------------- command line
smoke="" config="" from=01 to=check trust=()
given_model="" given_dataset="" given_output="" given_samples=""
while [ $# -gt 0 ]; do
  case $1 in
    --smoke) smoke=yes ;;
    --trust-remote-code) trust=(--trust-remote-code) ;;
    -h | --help)
      sed -n '2,/^set -/{/^set -/!s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --config | --model-path | --dataset | --output-dir | --max-samples | --from | --to)
      [ $# -ge 2 ] || fail "$1 needs a value"
      case $1 in
        --config) config=$2 ;;
        --model-path) given_model=$2 ;;
        --dataset) given_dataset=$2 ;;
        --output-dir) given_output=$2 ;;
        --max-samples) given_samples=$2 ;;
        --from) from=$2 ;;
        --to) to=$2 ;;
      esac
      shift
      ;;
    *) fail "unknown option $1; --help lists them" ;;
  esac
  shift
done
place() { # position of a stage in the list
  local i
  for i in "${!stages[@]}"; do
    if [ "${stages[$i]}" = "$1" ]; then
      echo "$i"
      return
    fi
  done
  fail "no stage $1; stages are ${stages[*]}"
}
first=$(place "$from")
last=$(place "$to")
[ "$first" -le "$last" ] || fail "--from $from comes after --to $to"

# ------------------------------------------------------------------------------------------------- settings
MODEL_PATH="" DATASET=mlabonne/open-perfectblend OUTPUT_DIR="" MAX_SAMPLES="" GPUS="" NOTE=""
PREPARE_ARGS=() EXTRACT_ARGS=() VOCAB_ARGS=() TRAIN_ARGS=() CHECK_ARGS=()
if [ -n "$smoke" ]; then
  [ -z "$config$given_model$given_dataset" ] || fail "--smoke always uses the embedded target and conversations"
  config=$root/configs/pipelines/smoke.env
fi
if [ -n "$config" ]; then
  [ -r "$config" ] || fail "--config $config: no such file"
  # shellcheck source=configs/pipelines/smoke.env
  source "$config"
fi
[ -z "$given_model" ] || MODEL_PATH=$given_model
[ -z "$given_dataset" ] || DATASET=$given_dataset
[ -z "$given_samples" ] || MAX_SAMPLES=$given_samples
[ -z "$given_output" ] || OUTPUT_DIR=$given_output

# shellcheck source=configs/environment.sh
source "$root/configs/environment.sh"
setup_environment
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

[ -n "$MODEL_PATH" ] || fail "--model-path is missing (or --smoke, which brings its own small target)"
OUT=${OUTPUT_DIR:-output/$(basename "$MODEL_PATH")}
[ "$MODEL_PATH" != embedded ] || MODEL_PATH=$("$PYTHON" -m eagle3.default_target)
[ "$DATASET" != embedded ] || DATASET=$root/configs/conversations/smollm2.jsonl
if [ -z "$GPUS" ]; then
  GPUS=$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')
fi
# torch.distributed.run would set one thread a rank, and say so
[ "$GPUS" = 1 ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
mkdir -p "$OUT/logs"

# --------------------------------------------------------------------------------------------------- stages
command_of() { # fills the array `command` for a stage
  local script=$root launcher=("$PYTHON")
  case $1 in
    01)
      command=("$PYTHON" "$script/01_prepare_dataset.py" --model-path "$MODEL_PATH" --output-dir "$OUT/prepared"
        --dataset "$DATASET" ${MAX_SAMPLES:+--max-samples "$MAX_SAMPLES"} --tensor-parallel-size "$GPUS"
        ${PREPARE_ARGS[@]+"${PREPARE_ARGS[@]}"} ${trust[@]+"${trust[@]}"})
      ;;
    02)
      command=("$PYTHON" "$script/02_extract_hidden_states.py" --model-path "$MODEL_PATH" --prepared-dir "$OUT/prepared"
        --output-dir "$OUT/hidden_states" --tensor-parallel-size "$GPUS"
        ${EXTRACT_ARGS[@]+"${EXTRACT_ARGS[@]}"} ${trust[@]+"${trust[@]}"})
      ;;
    03)
      command=("$PYTHON" "$script/03_build_vocab_map.py" --prepared-dir "$OUT/prepared" --output-dir "$OUT/vocab_map"
        ${VOCAB_ARGS[@]+"${VOCAB_ARGS[@]}"})
      ;;
    04)
      [ "$GPUS" = 1 ] || launcher+=(-m torch.distributed.run --standalone --nproc-per-node "$GPUS")
      command=("${launcher[@]}" "$script/04_train_draft.py" --model-path "$MODEL_PATH"
        --hidden-states-dir "$OUT/hidden_states" --vocab-map-dir "$OUT/vocab_map" --output-dir "$OUT/draft"
        ${NOTE:+--note "$NOTE"} ${TRAIN_ARGS[@]+"${TRAIN_ARGS[@]}"})
      ;;
    check)
      command=("$PYTHON" -m eagle3.served_check --model-path "$MODEL_PATH" --prepared-dir "$OUT/prepared"
        --draft-dir "$OUT/draft" --tensor-parallel-size "$GPUS"
        ${CHECK_ARGS[@]+"${CHECK_ARGS[@]}"} ${trust[@]+"${trust[@]}"})
      ;;
  esac
}

child="" caught=""
forward() {
  caught=$1
  [ -z "$child" ] || kill -"$1" "$child" 2>/dev/null || true
}
for name in INT TERM HUP; do
  # shellcheck disable=SC2064 # the name of this round
  trap "forward $name" "$name"
done

times=""
for stage in "${stages[@]:$first:$((last - first + 1))}"; do
  log=$OUT/logs/$stage.log
  printf '\n=== %s === (log %s)\n' "$stage" "$log"
  command_of "$stage"
  { printf '\n[%s]' "$(date '+%F %T')" && printf ' %q' "${command[@]}" && echo; } >>"$log"
  began=$SECONDS
  # Not `stage | tee`: the stage's own exit code and process id are needed. tee stays to the stage's last word. The stage
  # is its own process group (set -m), so that a signal to the terminal and one to this script alone reach it alike:
  # once, from here, and only the process that passes it on to its children.
  set -m
  "${command[@]}" </dev/null > >(trap '' INT TERM HUP && exec tee -a "$log") 2>&1 &
  child=$!
  set +m
  [ -z "$caught" ] || forward "$caught" # which came while the stage was started
  code=0
  while :; do
    wait "$child" 2>/dev/null && code=0 || code=$?
    kill -0 "$child" 2>/dev/null || break # else the wait was interrupted by a signal
  done
  wait "$child" 2>/dev/null && code=0 || code=$?
  child=""
  if [ "$code" != 0 ] || [ -n "$caught" ]; then
    sleep 0.2 # the last lines pass through tee
    why="failed"
    [ "$code" != 137 ] || why="was killed, perhaps by the kernel for want of memory (dmesg says so)"
    [ "$stage$code" != 023 ] || why="reached --max-disk-gb; make room, then the same command continues"
    [ -z "$caught" ] || why="stopped by SIG$caught"
    printf '\nrun_pipeline.sh: stage %s %s, exit code %s; log %s\n' "$stage" "$why" "$code" "$log" >&2 || true
    case $caught in
      HUP) exit 129 ;;
      INT) exit 130 ;;
      TERM) exit 143 ;;
    esac
    exit "$code"
  fi
  times="$times $stage $((SECONDS - began))s"
done

printf '\nseconds by stage:%s\n' "$times"
if [ "$last" -ge 3 ]; then
  printf 'the draft lies in %s\n' "$OUT/draft/export"
  [ -z "$NOTE" ] || printf '%s\n' "$NOTE"
fi
