# shellcheck shell=bash
# Sourced by the scripts that talk to a cloud: flags, and commands that can be shown instead of run.

. launch/venv.sh

dry_run=
command=() # The command of vit_jax: what stands after --.

# parse_flags NAMES ARGUMENT…: sets a variable for each --NAME=VALUE of NAMES; to yes for each --NAME
# that stands as NAME? there.
parse_flags() {
  local known_flags=" $1 dry_run? " flag
  shift
  while [ $# -gt 0 ]; do
    flag=${1%%=*}
    case $1 in
      --)
        shift
        command=("$@")
        return
        ;;
      -h | --help) usage; exit 0 ;;
      --*) ;;
      *) fail "$1 is not a flag; what is to run follows --" ;;
    esac
    case $known_flags in
      *" ${flag#--}? "*)
        [ "$flag" = "$1" ] || fail "$1: $flag takes no value"
        printf -v "${flag#--}" yes
        ;;
      *" ${flag#--} "*)
        [ "$flag" != "$1" ] || fail "$flag needs a value: $flag=…"
        printf -v "${flag#--}" %s "${1#*=}"
        ;;
      *) fail "there is no flag $flag; known:${known_flags//\?/}" ;;
    esac
    shift
  done
}

# check SCRIPT NAME…: has launch/check.py look at these flags, and prints what it answers.
check() {
  local script=$1 flag python=.venv/bin/python values=()
  shift
  for flag in "$@"; do values+=("--$flag=${!flag}"); done
  [ -x "$python" ] || python=$(find_python) || fail "Python 3.11 or newer is needed; set PYTHON to one"
  "$python" launch/check.py "$script" "${values[@]}"
}

# need NAME…: ends with an error unless these flags were given.
need() {
  local name
  for name in "$@"; do
    [ -n "${!name:-}" ] || fail "--$name=… is needed"
  done
}

need_command() {
  [ ${#command[@]} -gt 0 ] || fail "what is to run? … -- train --config=FILE --workdir=DIR"
}

# What the comment at the head of the script says.
usage() { sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "$0"; }

fail() { echo "$(basename "$0"): $*" >&2; exit 2; }

# Ends with an error that is none of the command line.
give_up() { echo "$(basename "$0"): $*" >&2; exit 1; }

# Shows a command and runs it; with --dry_run shows it alone.
run() {
  if [ -n "$dry_run" ]; then
    show "$@"
  else
    show "$@" >&2
    "$@"
  fi
}

# A command as one would type it.
show() {
  local word quoted=()
  for word in "$@"; do
    case $word in
      '' | *[!A-Za-z0-9_./:=,@%+-]*) quoted+=("'${word//\'/\'\\\'\'}'") ;;
      *) quoted+=("$word") ;;
    esac
  done
  echo "${quoted[*]}"
}
