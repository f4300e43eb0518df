# Every bash of a recorded script reads this file first (BASH_ENV). Before each simple command a trap makes sure that PATH holds stubs
# alone, makes a function of a command that is named by a path, and moves files that are written or sourced into the mirror.

__megaplan_call() { "$MEGAPLAN_BIN/megaplan-stub" "$@"; }

command_not_found_handle() { __megaplan_call "$@"; }

# Into the mirror, where the folder becomes a real one; a folder that is absent here, as of a cluster, is made.
cd() {
    local path=${*: -1}
    [[ $# -eq 0 || $path == -* ]] && { builtin cd "$@"; return; }
    [[ -d $path ]] || __megaplan_call absent "$path"
    builtin cd "${@:1:$#-1}" "$("$MEGAPLAN_BIN/megaplan-folder" "$path")"
}

kill() { __megaplan_call kill "$@"; }

ulimit() { builtin ulimit "$@" 2>/dev/null || builtin :; }

# A command's name, expanded: a path becomes a function that calls its stub.
__megaplan_named() {
    if [[ ${1-} == */* && $1 != "$MEGAPLAN_BIN"/* && $1 =~ ^[A-Za-z0-9_./+-]+$ ]]; then
        eval "function $1 { __megaplan_call '$1' \"\$@\"; }"
    fi
}

# A sourced file, expanded: one that is absent is written down, one that the script wrote is read from the mirror.
__megaplan_sourced() {
    local path=$MEGAPLAN_FOLDER/tree${1-}
    [[ -e ${1-} ]] && return
    __megaplan_skip=true
    if [[ ${1-} == /* && -e $path ]]; then printf -v __megaplan_do '. %q' "$path"; else __megaplan_call absent "$@"; fi
}

# What to do before a command: texts that the trap runs in the script's own scope, and whether they take the command's place.
__megaplan_before() {
    local command=$3 moved=''
    export MEGAPLAN_AT="$2:$1"
    __megaplan_ask='builtin :' __megaplan_do='builtin :' __megaplan_skip=false
    shopt -q extdebug || shopt -s extdebug
    [[ $PATH == "$MEGAPLAN_BIN" ]] || PATH=$MEGAPLAN_BIN
    case $command in '[['* | '(('* | 'for '* | 'case '* | 'select '* | __megaplan*) return ;; esac
    if [[ ${command//>\/dev\/null/} == *'>'[!\&\(]* ]]; then
        moved=$("$MEGAPLAN_BIN/megaplan-redirects" "$command")
    fi
    if [[ $command == 'source '* || $command == '. '* ]] && [[ $command != *'<('* ]]; then
        __megaplan_ask="__megaplan_sourced ${command#* }"
    elif [[ $command == 'exec '* && ! ${command#exec } =~ ^[[:space:]]*[\<\>0-9\&\{] ]]; then
        __megaplan_do="__megaplan_call ${moved:-$command}; exit" __megaplan_skip=true
    else
        if [[ $command =~ ^([A-Za-z_][A-Za-z_0-9]*=[^[:space:]]*[[:space:]]+)*([^[:space:]=]+)([[:space:]]|$) ]]; then
            case ${BASH_REMATCH[2]} in *'$('* | *'`'* | *'${!'* | *'<'* | *'>'*) ;; *[/\$]*) __megaplan_ask="__megaplan_named ${BASH_REMATCH[2]}" ;; esac
        fi
        if [[ -n $moved ]]; then
            __megaplan_do=$moved __megaplan_skip=true
        fi
    fi
}

# At the end of a script: its variables that hold arguments, if another script was to launch them, and those that nothing has set.
__megaplan_ends() {
    local status=$? name
    local -a words=()
    trap - DEBUG
    [[ $BASHPID == "$$" ]] || return "$status"
    set +eu
    if ! compgen -G "$MEGAPLAN_FOLDER/records/*-launch.json" >/dev/null; then
        for name in $(compgen -v); do
            case $name in _* | BASH* | MEGAPLAN* | words | name | status) continue ;; esac
            local -n held=$name
            if [[ ${held[0]-} =~ ^[[:space:]]*--[a-z] ]]; then
                set -f
                __megaplan_call variable "$name" ${held[@]}
            fi
            unset -n held
        done 2>/dev/null
    fi
    if [[ -f $0 && -r $0 ]]; then
        for name in $("$MEGAPLAN_BIN/grep" -IoE '[$][{]?[A-Za-z_][A-Za-z_0-9]*' "$0" | "$MEGAPLAN_BIN/tr" -d '${' | "$MEGAPLAN_BIN/sort" -u); do
            [[ -v $name ]] || words+=("$name")
        done
        [[ ${#words[@]} -gt 0 ]] && __megaplan_call unset "$0" "${words[@]}"
    fi
    return "$status"
}

PATH=$MEGAPLAN_BIN
set -o functrace
trap __megaplan_ends EXIT
# The last command: extdebug, by which a command can be skipped, may be set only after bash has read this file. `||` and `!` keep the
# script's `set -e` out of the trap, and `builtin` a function of the script that is named `:`.
trap '__megaplan_before "$LINENO" "${BASH_SOURCE-}" "$BASH_COMMAND" || builtin :
eval "$__megaplan_ask" || builtin :; eval "$__megaplan_do" || builtin :; ! $__megaplan_skip' DEBUG
