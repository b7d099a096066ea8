"""The settings of a console: where it listens, its database, time-outs, tokens, and how long its history is kept."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path

from openrecycle.agent.coordination.membership import FailureTimeouts
from openrecycle.agent.messages.protocol import is_loopback
from openrecycle.app.runtime.errors import SettingsError
from openrecycle.planner.plans.plan import read_whole

MIN_TOKEN = 16
_ADDRESS = re.compile(r"https?://[A-Za-z0-9._\[\]:-]{1,200}(/[A-Za-z0-9._~/-]{0,40})?")
_NAME = re.compile(r"[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63}){0,10}|\[[0-9a-fA-F:]+\]")


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LEAST_MINUTES = 2 * 3600.0
LEAST_HOURS = 2 * 86_400.0


@dataclass(frozen=True)
class RetentionLimits:
    """How much history is kept.

    seconds, minutes, hours: for how long (in seconds) the samples of each second, minute and hour are kept. events,
    states: how many of the newest lines of a job's feed and changes of workers' states. generations: for how many of
    the newest ones the acknowledgements. plans: how many of the newest plans made ahead, per job.
    """

    seconds: float = 15 * 60.0
    minutes: float = 2 * 86_400.0
    hours: float = 400 * 86_400.0
    events: int = 100_000
    states: int = 100_000
    generations: int = 50
    plans: int = 2_000

    def __post_init__(self) -> None:
        for option, value, least, why in (
            ("--keep-seconds", self.seconds, 120.0, "two minutes"),
            ("--keep-minutes", self.minutes, LEAST_MINUTES, "two hours, which hours are made of"),
            ("--keep-hours", self.hours, LEAST_HOURS, "two days"),
        ):
            if not least <= value <= 36_500 * 86_400.0:
                raise SettingsError(f"{option}: got {value:g} s, expected at least {why}, at most 36,500 days")
        if self.events < 1_000:
            raise SettingsError(f"--keep-events: got {self.events}, expected at least 1000")


@dataclass(frozen=True)
class OidcSettings:
    """Sign-in by OpenID Connect. file: has Streamlit's [auth] section. providers: their names in it; "" for a single
    one without a name.

    operators, viewers: e-mail addresses, with * for any characters, or `group:NAME`.
    """

    file: Path
    providers: tuple[str, ...]
    redirect_uri: str
    operators: tuple[str, ...]
    viewers: tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    """The settings of a console. database_url: empty for the default file. token: None only on a loopback address.

    tolerance: plans are made ahead for up to this many failures. advertise: the address for other machines, see
    `advertised`. names: host names under which it is reached, for example through a proxy. proxies: addresses of
    trusted proxies, which may say who the client is. oidc: if people may sign in with an account. keep: how much
    history. connections_per_address: how many one address may have open, if it is no proxy's; 0: half of all.
    """

    host: str = "127.0.0.1"
    port: int = 8501
    database_url: str = ""
    token: str | None = field(default=None, repr=False)
    failure_timeouts: FailureTimeouts = field(default_factory=FailureTimeouts)
    tolerance: int = 2
    api_only: bool = False
    advertise: str = ""
    names: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ("127.0.0.1", "::1")
    oidc: OidcSettings | None = None
    keep: RetentionLimits = field(default_factory=RetentionLimits)
    connections_per_address: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"--port: got {self.port}, expected 0 (any free one) to 65535")
        if self.advertise and not _ADDRESS.fullmatch(self.advertise):
            raise SettingsError(f"--advertise: got {self.advertise!r}, expected an address such as http://node1:8501")
        if self.token is not None and (len(self.token) < MIN_TOKEN or not self.token.isprintable()):
            raise SettingsError(f"the token must have at least {MIN_TOKEN} printable characters")
        if self.token is None and not self.loopback:
            raise SettingsError(
                f"--host {self.host} can be reached from other machines, so a token is needed: "
                "set OPENRECYCLE_TOKEN, or --token-file to a file with mode 0600"
            )
        for option, value in (("--host-name", self.names), ("--oidc", self.oidc)):
            if value and self.token is None:
                raise SettingsError(
                    f"{option} lets others in, so a token is needed: set OPENRECYCLE_TOKEN, or --token-file"
                )
        if self.oidc is not None and self.api_only:
            raise SettingsError("--oidc: people sign in on the pages, and --api-only serves none")
        if self.connections_per_address < 0:
            got = self.connections_per_address
            raise SettingsError(f"--connections-per-address: got {got}, expected at least 1, or 0 for half of all")
        for name in self.names:
            if not _NAME.fullmatch(name):
                raise SettingsError(f"--host-name: got {name!r}, expected a host name such as console.example.org")
        for address in self.proxies:
            if not _is_network(address):
                raise SettingsError(f"--proxy: got {address!r}, expected an address or network such as 10.0.0.0/8")

    def is_proxy(self, address: str) -> bool:
        """Says whether the address is that of a trusted proxy."""
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(found in ipaddress.ip_network(proxy) for proxy in self.proxies)

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def advertised(self) -> str:
        """The address for other machines, as far as this one knows it; standbys name it as their leader's."""
        if self.advertise:
            return self.advertise.rstrip("/")
        return self.address if self.host not in ("0.0.0.0", "::") else f"http://{socket.gethostname()}:{self.port}"

    @property
    def address(self) -> str:
        """The address for a browser on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def seconds(text: str, option: str) -> float:
    """Parses `90s`, `15m`, `48h` or `400d` into seconds. Raises SettingsError."""
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text.strip())
    if found is None:
        raise SettingsError(f"{option}: got {text!r}, expected a number and s, m, h or d, such as 15m")
    return float(int(found[1]) * _UNITS[found[2]])


def default_database_url() -> str:
    """Returns the URL of a file below the user's state folder (XDG)."""
    state = os.environ.get("XDG_STATE_HOME", "")
    root = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    return f"sqlite:///{root / 'openrecycle' / 'console.db'}"


def read_token(token_file: Path | None) -> str | None:
    """Returns the token from the file, or else from OPENRECYCLE_TOKEN; None: neither is given.

    Raises SettingsError for a file that others can read.
    """
    if token_file is None:
        return os.environ.get("OPENRECYCLE_TOKEN") or None
    return read_secret(token_file, "--token-file").strip()


def read_secret(file: Path, option: str) -> str:
    """Reads a file with a secret. Raises SettingsError for a file that others can read."""
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        text = read_whole(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SettingsError(f"{option} {file} can't be read: {why}") from None
    if mode & 0o077:
        raise SettingsError(f"{option} {file} has mode {mode:04o}, expected 0600: others must not read it")
    return text
