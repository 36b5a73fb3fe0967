# Sourced by quickstart.sh and test.sh, which run at the root of the repository.
#
#   use_environment EXTRAS    makes .venv with the package, its EXTRAS and the tested versions of scripts/constraints.txt,
#                             and puts it on PATH. Takes minutes once, and a moment from then on.

VENV=${VENV:-.venv}
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

use_environment() {
    local extras=$1 stamp="$VENV/.installed-$1" wanted
    wanted=$(cat scripts/constraints.txt pyproject.toml scripts/env.sh | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        make_environment "$extras"
        echo "$wanted" > "$stamp"
    fi
    # An absolute path: accelerate and pytest start processes in other folders.
    PATH="$(cd "$VENV" && pwd)/bin:$PATH"
}

make_environment() {
    echo "installing into $VENV, once: 1 of 3, an empty environment"
    [ -x "$VENV/bin/python" ] || "$(find_python)" -m venv "$VENV"
    echo "installing into $VENV, once: 2 of 3, torch (its CPU build is 200 MB, with CUDA it is some GB)"
    install_torch
    echo "installing into $VENV, once: 3 of 3, hf_flexseq with its extras $1"
    pip_install --editable ".[$1]"
}

# What pip does is shown on a terminal. In a file it would be hundreds of lines.
pip_install() {
    local pip=("$VENV/bin/python" -m pip --disable-pip-version-check)
    [ -t 1 ] || pip+=(--quiet)
    "${pip[@]}" install --constraint scripts/constraints.txt "$@"
}

# torch comes first: without a GPU its CPU build is wanted, a tenth of the size, and nothing else must pull in the other.
install_torch() {
    if ! has_gpu; then
        pip_install --retries 1 torch --extra-index-url "$TORCH_CPU_INDEX" && return
        echo "no torch from $TORCH_CPU_INDEX: going on without it"
    fi
    pip_install torch
}

has_gpu() {
    command -v nvidia-smi > /dev/null && nvidia-smi -L 2> /dev/null | grep -q GPU
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11 or newer is needed: put one on PATH or set PYTHON=/path/to/python" >&2
    return 1
}
