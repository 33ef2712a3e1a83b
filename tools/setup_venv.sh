#!/usr/bin/env bash
# Make or complete the virtual environment that `make demo`, `make test` and `make check` use.
#
#     tools/setup_venv.sh [EXTRA ...]        for example: tools/setup_venv.sh test dev
#
# The environment is .venv, or the folder that $VENV names. $PYTHON names the interpreter to make it
# with; otherwise the newest python3.x that is new enough is taken. A second run adds what is missing.
#
# The one thing that needs care is torch: for x86-64 and aarch64 alike, the package index offers the
# CUDA build of this release, which is several GB and of no use on a machine without an NVIDIA GPU.
set -euo pipefail

cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
torch=$(sed -n 's/^torch==//p' constraints.txt)
oldest=11 # Python 3.11

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
    printf 'setup: error: %s\n' "$@" >&2
    exit 1
}

new_enough() {
    "$1" -c "import sys; sys.exit(sys.version_info < (3, $oldest))" >/dev/null 2>&1
}

can_make_venv() {
    "$1" -c 'import ensurepip, venv' >/dev/null 2>&1
}

# Print the interpreter to use. A name on PATH may be a stub that can't start, so each one is tried.
find_python() {
    local name without=
    for name in python3.14 python3.13 python3.12 python3.11 python3; do
        new_enough "$name" || continue
        if can_make_venv "$name"; then
            echo "$name"
            return
        fi
        without=${without:-$name}
    done
    if [ -n "$without" ]; then
        fail "$without can't make virtual environments: its modules venv and ensurepip are missing." \
            "On Debian or Ubuntu: apt install python3-venv (for python3.x: python3.x-venv)"
    fi
    fail "no Python 3.$oldest or newer found." \
        "On Debian or Ubuntu: apt install python3 python3-venv." \
        "Or name one: make PYTHON=/path/to/python3 ..."
}

make_venv() {
    local python
    python=${PYTHON:-$(find_python)} || exit 1
    new_enough "$python" || fail "$python is not a Python 3.$oldest or newer"
    can_make_venv "$python" || fail "$python lacks the modules venv and ensurepip"
    say "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
# Most modules of large packages are never imported, so each is compiled when it first is.
install() { pip install -qq --no-compile --constraint constraints.txt "$@"; }

has_gpu() { [ -e /dev/nvidiactl ]; }
has_torch() {
    "$venv/bin/python" -c 'import sys
from importlib.metadata import version
sys.exit(version("torch").split("+")[0] != sys.argv[1])' "$torch" 2>/dev/null
}

install_torch() {
    if has_torch; then
        return
    fi
    if has_gpu; then
        say "installing torch with CUDA (there is an NVIDIA GPU)"
        install "torch>=2.11"
        return
    fi
    say "installing the CPU build of torch $torch (there is no NVIDIA GPU)"
    # Where pip has been told of an index or folder with CPU builds, this is all it takes.
    if install "torch==$torch+cpu" 2>/dev/null; then
        return
    fi
    # uv knows where PyTorch keeps its CPU builds.
    say "pip knows of no CPU build; asking uv"
    if install uv && "$venv/bin/python" -m uv pip install --quiet \
        --python "$venv/bin/python" --torch-backend=cpu "torch==$torch"; then
        return
    fi
    fail "could not install the CPU build of torch $torch; the CUDA build (several GB) was not tried." \
        "Either install it by hand with $venv/bin/pip (PyTorch's page 'Get Started' prints the" \
        "command for Linux, Pip, CPU) and run make again," \
        "or name a folder that holds the CPU wheel: PIP_FIND_LINKS=/folder make ..."
}

# The extra with kvikio and the CUDA libraries of the release that torch was built for. Tests run
# them on a stand-in for the driver, so they are of use without a GPU too.
cuda_extra() {
    "$venv/bin/python" -c 'import torch
print("cu12" if (torch.version.cuda or "").startswith("12") else "cu13")'
}

install_project() {
    local extras
    extras=$(IFS=,; echo "$*")
    say "installing tensorspill${extras:+ with the extras $extras}"
    install --editable ".${extras:+[$extras]}"
}

# Not every machine has builds of them; what needs them is skipped then, saying so.
install_cuda_packages() {
    local extra
    extra=$(cuda_extra)
    say "installing the packages of the extra $extra (about 2 GB, once)"
    install --editable ".[$extra]" ||
        say "warning: could not install them: tests of the GPU paths will be skipped"
}

# It needs torch to be installed, so it can't be built apart from it.
install_deepspeed() {
    say "installing DeepSpeed, to test its interface"
    install setuptools wheel && install --no-build-isolation deepspeed ||
        say "warning: could not install it: its tests will be skipped"
}

# An environment whose interpreter went away (an upgrade, a moved checkout) is made anew.
if ! new_enough "$venv/bin/python" || ! pip --version >/dev/null 2>&1; then
    make_venv
fi
install_torch
install_project "$@"
case " $* " in
*" test "*)
    install_cuda_packages
    install_deepspeed
    ;;
esac
