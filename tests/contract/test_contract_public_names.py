"""The public names and signatures, which the versions of optax and Flax are part of."""

from tests import public_api


def test_public_names():
    """A name or parameter added or lost is a change for users: into the snapshot and CHANGELOG."""
    snapshot = public_api.SNAPSHOT.read_text(encoding="utf-8").splitlines()
    update = "if meant, say so in CHANGELOG.md and run: python -m tests.public_api"
    assert list(public_api.lines()) == snapshot, update
