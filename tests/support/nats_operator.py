"""A NATS as an operator runs it: accounts and users by signed tokens, and a credentials file for one user."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import nkeys

UNLIMITED = {
    **dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1),
    **dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1),
    "wildcards": True,
}


class _Key:
    def __init__(self, prefix: int) -> None:
        self.seed = nkeys.encode_seed(os.urandom(32), prefix)
        self._pair = nkeys.from_seed(bytearray(self.seed))
        self.public = self._pair.public_key.decode()

    def sign(self, subject: str, name: str, claims: dict[str, Any]) -> str:
        """A token that says `claims` of `subject`."""
        body = {"jti": os.urandom(8).hex(), "iat": 1_700_000_000, "iss": self.public, "name": name, "sub": subject}
        parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, body | {"nats": claims | {"version": 2}}]
        text = ".".join(_base64(json.dumps(part).encode()) for part in parts)
        return f"{text}.{_base64(self._pair.sign(text.encode()))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def operator_config(creds: Path) -> str:
    """A template for `NatsServer`; the user's credentials are written to `creds`."""
    operator, system, account, user = (
        _Key(kind) for kind in (nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_USER)
    )
    operator_token = operator.sign(operator.public, "operator", {"type": "operator", "system_account": system.public})
    system_token = operator.sign(system.public, "SYS", {"type": "account"})
    account_token = operator.sign(account.public, "APP", {"type": "account", "limits": UNLIMITED})
    user_token = account.sign(user.public, "slipstream", {"type": "user", "subs": -1, "data": -1, "payload": -1})
    creds.write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    return f"""
host: 127.0.0.1
port: {{port}}
ports_file_dir: "{{folder}}"
operator: "{operator_token}"
system_account: "{system.public}"
resolver: MEMORY
resolver_preload: {{{{ {system.public}: "{system_token}", {account.public}: "{account_token}" }}}}
jetstream {{{{ store_dir: "{{folder}}/store", max_mem: 256MB, max_file: 256MB }}}}
"""
