#!/bin/sh
set -e
cat > notes.sh <<'SH'
#!/bin/sh
fail() {
  echo "error: $1" >&2
  exit 2
}
number() { awk '{ print NR " " $0 }' notes.txt; }
count() { if [ -e notes.txt ]; then wc -l < notes.txt; else echo 0; fi; }
what=$1
[ $# -gt 0 ] && shift
case $what in
  add)
    [ $# -gt 0 ] || fail "add needs a text"
    printf '%s\n' "$*" >> notes.txt ;;
  list)
    [ ! -e notes.txt ] || number ;;
  find)
    [ $# -eq 1 ] || fail "find needs a word"
    [ -e notes.txt ] || exit 1
    WORD=$1 awk 'index(tolower($0), tolower(ENVIRON["WORD"])) { print NR " " $0; found = 1 } END { exit !found }' notes.txt ;;
  done)
    case $1 in "" | *[!0-9]*) fail "done needs a number" ;; esac
    [ "$1" -ge 1 ] && [ "$1" -le "$(count)" ] || fail "there is no note $1"
    sed "$1d" notes.txt > notes.tmp && mv notes.tmp notes.txt ;;
  *) fail "expected add, list, find or done" ;;
esac
SH
