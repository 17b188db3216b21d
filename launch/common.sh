# shellcheck shell=bash
# Sourced by the scripts that talk to a cloud: flags, and commands that can be shown instead of run.

dry_run=
command=() # What vit_jax is told: what stands after --.

# parse_flags NAMES ARGUMENT…: sets a variable for each --NAME=VALUE (or --NAME: yes) of NAMES.
parse_flags() {
  local known_flags=" $1 dry_run " flag
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
      *) fail "cannot make anything of $1" ;;
    esac
    case $known_flags in *" ${flag#--} "*) ;; *) fail "there is no flag $flag; known:$known_flags" ;; esac
    if [ "$flag" = "$1" ]; then printf -v "${flag#--}" yes; else printf -v "${flag#--}" %s "${1#*=}"; fi
    shift
  done
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
