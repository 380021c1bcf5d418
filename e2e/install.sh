#!/bin/sh
# Installs what the end-to-end tests and the demo need on Debian 12, from the
# distribution only. What is there already is left alone. It never starts a
# service: the tests start their own daemons in their own namespaces.
set -eu

missing=""
need() { # program package
	command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || [ -x "/sbin/$1" ] || missing="$missing $2"
}
need nginx nginx
need dockerd docker.io
need ip iproute2
need nft nftables
need haproxy haproxy
need wrk wrk
need gcc gcc      # the race detector links with it
need git git
[ -e /usr/lib/nginx/modules/ngx_stream_module.so ] || missing="$missing libnginx-mod-stream"
[ -e /usr/include/stdlib.h ] || missing="$missing libc6-dev"

if ! command -v go >/dev/null 2>&1; then
	echo "Go is missing: install the version that go.mod names, see https://go.dev/doc/install" >&2
	exit 1
fi
if [ -n "$missing" ]; then
	if [ "$(id -u)" != 0 ]; then
		echo "missing:$missing; run this as root, or install them" >&2
		exit 1
	fi
	if ! command -v apt-get >/dev/null 2>&1; then
		echo "missing:$missing; install them with this system's package manager" >&2
		exit 1
	fi
	# A package must not start its service: port 80 and the Docker socket of
	# the machine are not ours.
	policy=/usr/sbin/policy-rc.d
	made=""
	if [ ! -e "$policy" ]; then
		printf '#!/bin/sh\nexit 101\n' >"$policy"
		chmod 755 "$policy"
		made=yes
		trap '[ -z "$made" ] || rm -f "$policy"' EXIT INT TERM
	fi
	export DEBIAN_FRONTEND=noninteractive
	apt-get update -q
	# shellcheck disable=SC2086 # a list of words
	apt-get install -q -y --no-install-recommends $missing
fi
if [ "$(id -u)" != 0 ]; then
	echo "the end-to-end tests and the demo need root (network namespaces, Docker engines)" >&2
	exit 1
fi
