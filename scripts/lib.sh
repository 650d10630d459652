# What the scripts share. Sourced by bash, never run.

set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)   # the repository
unset BERTH_SOCKET # a person's, for berth; the agent takes BERTH_ names for its settings
engine_socket=${SETUP_SOCKET:-/var/run/docker.sock}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/berth

say() { printf '%s: %s\n' "${0##*/}" "$*"; }
warn() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { warn "$*"; exit 1; }

# as_root runs a command as root, with the same PATH (sudo has one of its own).
as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo env "PATH=$PATH" "$@"
    else
        die "root is needed for: $*. Run this as root, or install sudo"
    fi
}

# alive PID [NAME]: the process runs (state Z is dead) and, where a name is given, is it.
alive() {
    local stat
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    case ${stat##*) } in [ZX]*) return 1 ;; esac
    [ $# -lt 2 ] || [ "$(cat "/proc/$1/comm" 2>/dev/null)" = "$2" ]
}

# started_at PID: its start time in clock ticks since boot, which with the pid names
# one process. The comm before it may hold spaces and parentheses.
started_at() {
    local stat
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    set -- ${stat##*) }
    echo "${20}"
}

# wait_for SECONDS WHAT COMMAND...: tries the command twice a second until it succeeds.
wait_for() {
    local deadline=$((SECONDS + $1)) what=$2 told=$SECONDS
    shift 2
    until "$@"; do
        [ $SECONDS -lt $deadline ] || return 1
        if [ $((SECONDS - told)) -ge 5 ]; then
            told=$SECONDS
            say "waiting for $what (${SECONDS}s)"
        fi
        sleep 0.5
    done
}

# engine METHOD PATH: one request to the Docker engine; succeeds with a 2xx answer.
# Perl's base package is essential on Debian and Ubuntu; curl and a docker command are not.
engine() {
    as_root perl -MIO::Socket::UNIX -e '
        my ($socket, $method, $path) = @ARGV;
        $SIG{ALRM} = sub { exit 1 }; alarm 10;
        my $s = IO::Socket::UNIX->new(Peer => $socket) or exit 1;
        print $s "$method $path HTTP/1.0\r\nHost: docker\r\n\r\n"; $s->flush;
        local $/; my $answer = <$s>;
        exit($answer =~ m{^HTTP/1\.\d 2} ? 0 : 1)' "$engine_socket" "$1" "$2" 2>/dev/null
}
