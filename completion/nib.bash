# SPDX-License-Identifier: Apache-2.0
# Completion of nib for bash. Commands, options and their words are asked of the tool itself, so that they are always its
# own.

# The words of a column: commands of `nib help`, options of `nib COMMAND --help`.
_nib_commands() { "$1" help 2>/dev/null | sed -n 's/^  \([a-z]\{1,\}\) .*/\1/p'; }
_nib_options() { "$1" "$2" --help 2>/dev/null | sed -n 's/^ \{1,\}\(-[a-zA-Z], \)\{0,1\}\(--[a-z0-9-]\{1,\}\).*/\2/p'; }
# The words that may stand behind an option.
_nib_words() { "$1" help --words 2>/dev/null | sed -n "s/^$2 $3 //p"; }
# Whether an option of a command takes an argument: its line names one in capitals.
_nib_takes() { "$1" "$2" --help 2>/dev/null | grep -qE -- "^ +(-[a-zA-Z], )?$3 [A-Z]|^ +$3, --[a-z0-9-]+ [A-Z]"; }

_nib() {
    local tool=${COMP_WORDS[0]} cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} command= i
    COMPREPLY=()
    # --option=value comes as three words.
    if [ "$cur" = = ]; then
        cur=
    elif [ "$prev" = = ] && [ "$COMP_CWORD" -gt 2 ]; then
        prev=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in
        -*) ;;
        *)
            command=${COMP_WORDS[i]}
            break
            ;;
        esac
    done
    if [ -z "$command" ]; then
        mapfile -t COMPREPLY < <(compgen -W "$(_nib_commands "$tool") --help --version" -- "$cur")
        return
    fi

    local values=
    case $command:$prev in
    quantize:--min-block-scale) values="0 2^-9 2^-6" ;;
    bench:--shape) values="4096x4096 14336x4096 4096x14336" ;;
    quantize:--activations)
        mapfile -t COMPREPLY < <(
            compgen -W "$(_nib_words "$tool" "$command" "$prev")" -- "$cur"
            compgen -f -X '!*.json' -- "$cur"
            compgen -d -- "$cur"
        )
        return
        ;;
    *:--report)
        mapfile -t COMPREPLY < <(
            compgen -f -X '!*.html' -- "$cur"
            compgen -f -X '!*.json' -- "$cur"
            compgen -d -- "$cur"
        )
        return
        ;;
    *:--against | *:--svg | *:--imatrix | *:--hessians)
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
        return
        ;;
    help:*) [[ $cur == -* ]] || values=$(_nib_commands "$tool") ;;
    *:--*) values=$(_nib_words "$tool" "$command" "$prev") ;;
    esac
    if [ -n "$values" ]; then
        mapfile -t COMPREPLY < <(compgen -W "$values" -- "$cur")
    elif [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$(_nib_options "$tool" "$command")" -- "$cur")
    elif [[ $prev == -* ]] && _nib_takes "$tool" "$command" "$prev"; then
        return # a number or a pattern: nothing to offer
    elif [ "$command" = bench ]; then
        mapfile -t COMPREPLY < <(compgen -W "$("$tool" bench --list 2>/dev/null)" -- "$cur")
    else
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    fi
}

complete -o filenames -F _nib nib nib-mpi
