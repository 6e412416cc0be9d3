"""Who asks: keys, and the tenants that they stand for."""

import hashlib
import hmac
from dataclasses import dataclass

SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Tenant:
    """One key's owner. What a tenant's documents left in any cache only that tenant can hit."""

    salt: str = ""
    "Empty where no keys are configured."

    @property
    def digest(self) -> str:
        """A short name for logs, from which the key cannot be found."""
        return hashlib.sha256(self.salt.encode()).hexdigest()[:8] if self.salt else "-"

    @classmethod
    def of_key(cls, key: str) -> "Tenant":
        """The tenant of a key, the same in every process."""
        return cls(hashlib.sha256(f"redknot-tenant:{key}".encode()).hexdigest())


class Keyring:
    """The configured keys."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = {hashlib.sha256(key.encode()).digest(): Tenant.of_key(key) for key in keys}

    def tenant(self, authorization: str) -> Tenant | None:
        """Who shows this header, if anybody; how long that takes says nothing about keys."""
        if not self._keys:
            return Tenant()
        scheme, shown = authorization[: len(SCHEME)], authorization[len(SCHEME) :]
        digest = hashlib.sha256(shown.strip().encode("utf-8", "replace")).digest()
        found = None
        for known, tenant in self._keys.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        return found if scheme.lower() == SCHEME else None
