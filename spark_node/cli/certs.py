"""`spark-dfl certs`: a run's authority, and the identities that it gives to peers, orchestrator and observer."""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_DESCRIPTION = """\
Make the certificates of a run over several machines. The authority's folder stays where it was made; each machine
gets a folder with its own identities only, the authority's certificate and the revocation list.
`spark-dfl run` does all this by itself for a network on one machine."""

_EPILOG = """\
examples:
  spark-dfl certs init authority --name monday
  spark-dfl certs issue authority --role orchestrator --out for-machine-1
  spark-dfl certs issue authority --peers 0:30 --out for-machine-2
  spark-dfl certs issue authority --role observer --out for-me
  spark-dfl certs revoke authority peer-004       then copy authority/revoked.json into the machines' folders
  spark-dfl certs show authority

Copy the folders over a channel that you trust; keys stay 0600. Then: spark-dfl host --certs for-machine-2 ...
A changed revoked.json is taken up within a second, without a restart."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `certs` command."""
    parser = subparsers.add_parser(
        "certs",
        help="a run's certificate authority and identities",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    init = _action(actions, "init", "make an authority in a new folder", _init)
    init.add_argument("--name", default="spark", help="name of the authority, for example of the run (default: spark)")
    init.add_argument("--days", type=_days, default=365.0, help="days for which it holds (default: 365)")
    issue = _action(actions, "issue", "make certificates and keys", _issue)
    issue.add_argument("names", metavar="NAME", nargs="*", help="identities (default: one named as its role)")
    issue.add_argument("--peers", metavar="A:B", help="peers A to B-1 by number, named as `host` names them")
    issue.add_argument("--nodes", metavar="N", type=int, help="peers of the run, where there are more than 1000")
    issue.add_argument("--role", choices=("peer", "orchestrator", "observer"), default="peer", help="default: peer")
    issue.add_argument("--days", type=_days, default=90.0, help="days for which they hold (default: 90)")
    issue.add_argument("--out", metavar="DIR", type=Path, help="folder for their holder (default: the authority's own)")
    revoke = _action(actions, "revoke", "end identities at once", _revoke)
    revoke.add_argument("names", metavar="NAME", nargs="+", help="identities")
    revoke.add_argument("--role", choices=("peer", "orchestrator", "observer"), default="peer", help="default: peer")
    _action(actions, "show", "what is in a folder", _show)


def _action(actions: Any, name: str, text: str, work: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the folder of the authority, or of a holder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(func=work)
    return parser


def _init(args: argparse.Namespace) -> int:
    from spark_node.security.authority import Authority

    authority = Authority.create(args.folder, args.name, args.days)
    done = f"authority {authority.name} in {args.folder}; keep authority.key there, and only there"
    _say(args, done, {"authority": authority.name, "folder": str(args.folder)})
    return 0


def _issue(args: argparse.Namespace) -> int:
    from spark_node.security.authority import Authority
    from spark_node.security.identity import Role

    authority, role = Authority.open(args.folder), Role(args.role)
    names = [*args.names, *_numbered(args)] or _default_names(role)
    made = [authority.issue(role, name, args.days, args.out).uri for name in names]
    where = args.out or args.folder
    _say(args, f"{len(made)} identities in {where}: {_few(made)}", {"folder": str(where), "identities": made})
    return 0


def _numbered(args: argparse.Namespace) -> list[str]:
    """The names of --peers A:B."""
    from spark_node.errors import ConfigError
    from spark_node.membership import peer_names

    if args.peers is None:
        return []
    first, colon, end = args.peers.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ConfigError(f"--peers {args.peers}: expected A:B with A < B, for example 0:30")
    return peer_names(max(args.nodes or 0, int(end)))[int(first) : int(end)]


def _default_names(role: Any) -> list[str]:
    from spark_node.errors import ConfigError
    from spark_node.security.identity import Role

    if role is Role.PEER:
        raise ConfigError("spark-dfl certs issue: name the peers, or give --peers A:B")
    return [role.value]


def _revoke(args: argparse.Namespace) -> int:
    from spark_node.security.authority import Authority
    from spark_node.security.identity import REVOKED, Role

    authority = Authority.open(args.folder)
    for name in args.names:
        authority.revoke(Role(args.role), name)
    done = f"revoked {_few(args.names)}; copy {args.folder / REVOKED} to every machine of the run"
    _say(args, done, {"revoked": args.names, "number": authority.revocations.number})
    return 0


def _show(args: argparse.Namespace) -> int:
    from cryptography import x509

    from spark_node.security import revocation
    from spark_node.security.authority import issued
    from spark_node.security.identity import AUTHORITY, REVOKED, CertificateError, paths

    try:
        root = x509.load_pem_x509_certificate((args.folder / f"{AUTHORITY}.pem").read_bytes())
    except (OSError, ValueError):
        raise CertificateError(f"{args.folder}: no authority.pem that can be read; give a folder of certs") from None
    revoked = revocation.read(args.folder / REVOKED, root)
    rows = []
    for _, seen in issued(args.folder):
        identity, expired = seen.identity, seen.not_after <= datetime.now(UTC)
        state = "revoked" if revoked.covers(identity) else "expired" if expired else "valid"
        key = paths(args.folder, identity.role, identity.name)[1].exists()
        rows.append({"identity": identity.uri, "until": f"{seen.not_after:%Y-%m-%d %H:%M}", "state": state, "key": key})
    text = "\n".join(
        [f"{r['identity']:<60} {r['state']:<8} until {r['until']}{' with key' if r['key'] else ''}" for r in rows]
    )
    _say(args, text or "no identities", {"authority": revoked.authority, "list": revoked.number, "identities": rows})
    return 0


def _say(args: argparse.Namespace, text: str, facts: dict[str, Any]) -> None:
    print(json.dumps(facts, indent=2) if args.json else text)


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} ... {names[-1]}"


def _days(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found <= 36_500:
        raise argparse.ArgumentTypeError(f"{text!r} days: allowed: a number above 0, up to 36500")
    return found
