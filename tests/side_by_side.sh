#!/usr/bin/env bash
# side_by_side.sh NAME COMMAND NAME COMMAND …: runs the commands at the same time. What the first says is shown as it
# comes, what the others say when they end, each as a whole; at the end, the last line of each. Fails if one failed.
set -uo pipefail
logs=$(mktemp -d)
names=() jobs=()

end() {  # a process group a command: pytest and what it has started
    for job in "${jobs[@]}"; do kill -TERM -- "-$job" 2>/dev/null; done
    sleep 5
    for job in "${jobs[@]}"; do kill -KILL -- "-$job" 2>/dev/null; done
    for name in "${names[@]:1}"; do echo "== $name, ended from outside"; cat "$logs/$name"; done
    rm -rf "$logs"
    exit 143
}
trap end TERM INT

report() {  # NAME LOG EXIT_CODE
    echo "== $1"
    cat "$2"
}

set -m
while (($#)); do
    name=$1 command=$2
    shift 2
    if ((${#names[@]})); then
        (bash -c "$command" >"$logs/$name" 2>&1; code=$?; report "$name" "$logs/$name"; exit $code) </dev/null &
    else
        (bash -c "$command" 2>&1 | tee "$logs/$name") </dev/null &
    fi
    names+=("$name") jobs+=($!)
done
failed=()
for i in "${!jobs[@]}"; do
    wait "${jobs[$i]}" || failed+=("${names[$i]}")
done
for name in "${names[@]}"; do printf '== %s: %s\n' "$name" "$(tail -n 1 "$logs/$name")"; done
rm -rf "$logs"
if ((${#failed[@]})); then
    echo "FAILED: ${failed[*]}"
    exit 1
fi
