"""Two nodes on one machine: network namespaces with a wire between them, made without privileges."""

import subprocess

FIRST, SECOND = "node-1", "node-2"  # of the namespaces, and in /etc/hosts
WIRED = f"""
set -e
mount -t tmpfs tmpfs /run
printf "127.0.0.1 localhost $(uname -n)\\n192.0.2.1 {FIRST}\\n192.0.2.2 {SECOND}\\n" > /run/hosts
mount --bind /run/hosts /etc/hosts
ip link set lo up
ip netns add {FIRST}
ip netns add {SECOND}
ip link add left type veth peer name right
for node in "{FIRST} left 192.0.2.1" "{SECOND} right 192.0.2.2"; do
  set -- $node "$@"
  ip link set "$2" netns "$1"
  ip -n "$1" link set "$2" name eth0
  ip -n "$1" addr add "$3/24" dev eth0
  ip -n "$1" link set eth0 up
  ip -n "$1" link set lo up
  shift 3
done
exec "$@"
"""
TWO_NODES = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", WIRED, "sh"]
CONFIG = 'REMOTE="ip netns exec"\nexport GLOO_SOCKET_IFNAME=eth0\n'
HOSTFILE = f"# two boxes\n{FIRST} slots=1\n\n{SECOND} slots=1  # behind the wire\n"


def fault() -> str:
    """Why the kernel lets none be made here, empty where it does."""
    listen = f"import socket; socket.create_server(('{FIRST}', 0))"
    command = [*TWO_NODES, "ip", "netns", "exec", FIRST, "python3", "-c", listen]
    return subprocess.run(command, capture_output=True, text=True).stderr.strip()
