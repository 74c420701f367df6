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
#   --gpus N             GPUs of the run (default all)
#   --hostfile FILE      several nodes that share a file system: lines `node-1 slots=8`; 02 and 04 run on all of them
#   --args STAGE FLAGS   more flags for a stage, over the config's: --args 04 "--epochs 3"
#   --from S, --to S     first and last stage to run: 01 02 03 04 check
#   --only S             one stage
#   --trust-remote-code  passed to every stage that loads tokenizer or model
#
#   --plan               print what the run takes and what is in its way, and end; also printed before every run
#   --machine M          with --plan: for another machine, gpus=8x96,memory=1000,disk=900 (GB)
#   --probe [N]          run N samples (default 32) in OUT/probe to measure rates and memory, then print the plan
#   --print-config       print every value and where it came from, and end
#   --force              run although the plan is in doubt
#   --redo               delete and make again what a changed value invalidates; without it that is refused
#   --detach             start the run and return; it goes on by itself
#   --status, --stop     of the run in OUT: how far it is; end it with everything saved
#
# Each stage logs to OUT/logs/. The same command after an interruption continues where it stopped, and finished stages
# are passed over. Ctrl-C stops the run with everything saved; a terminal that closes does not stop it.
# Exit codes: 0; 1 a stage failed, or there is no run to ask after; 2 refused before anything ran, another run in OUT
# among the reasons; 3 --max-disk-gb is reached; 130, 143 stopped. Options are written out: --out-dir is refused.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
case " $* " in
  *" --help "* | *" -h "*)
    sed -n '2,/^set -/{/^set -/!s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
# shellcheck source=configs/environment.sh
source "$root/configs/environment.sh"
setup_environment
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$PYTHON" -m eagle3.pipeline "$@"
