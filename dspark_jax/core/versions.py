"""Which jax is installed and whether its parts fit together, read without importing it.

The jax of a Colab, TPU or GPU image belongs to the accelerator's plug-in. An install that moves
one without the other breaks the image, at the next import and in words that name neither.
"""

import importlib
import re
from collections.abc import Iterable, Mapping
from importlib import metadata

from packaging.requirements import Requirement

from dspark_jax.core.errors import UserError

_FAMILY = re.compile(r"jax|jaxlib|libtpu|jax-(cuda|rocm)\w*-(plugin|pjrt)")
_ADVICE = (
    "restart the runtime and take its jax as it is, or on a machine of your own install all of "
    'them together: pip install -U "jax", "jax[tpu]" or "jax[cuda13]"'
)


def jax_versions() -> dict[str, str]:
    """Installed versions of jax, jaxlib and the plug-ins of accelerators, by name."""
    importlib.invalidate_caches()
    found = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if _FAMILY.fullmatch(name):
            found.setdefault(name, distribution.version)  # the first on the path is the one used
    return dict(sorted(found.items()))


def pins(versions: Mapping[str, str]) -> list[str]:
    """What to name in a `pip install` so that it leaves these versions where they are."""
    return [f"{name}=={version}" for name, version in versions.items()]


def check_versions(before: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns `jax_versions()` if they fit together and are those of `before`.

    Raises:
        UserError: there is no jax, a part does not fit the others, or an install has moved one.
    """
    now = jax_versions()
    if "jax" not in now:
        raise UserError(f"jax is not installed: {_ADVICE}")
    for name, version in (before or {}).items():
        if now.get(name) != version:
            raise UserError(
                f"the install moved {name} from {version} to {now.get(name, 'nowhere')}, and the "
                f"accelerator of this machine may not work with it: {_ADVICE}"
            )
    for name in now:
        if problem := misfit(name, metadata.requires(name) or (), now):
            raise UserError(f"{problem}: {_ADVICE}")
    return now


def misfit(name: str, requirements: Iterable[str], versions: Mapping[str, str]) -> str | None:
    """What of `versions` is not as the distribution `name` asks, or None.

    Of jax's extras the plug-ins count: whoever has one must have the one made for this jax. What
    they ask of jaxlib does not: "ci", for one, is for tests of jax itself.
    """
    for text in requirements:
        wanted = Requirement(text)
        part = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if part not in versions or (part == "jaxlib" and "extra" in str(wanted.marker)):
            continue
        if not wanted.specifier.contains(versions[part], prereleases=True):
            return (
                f"{name} {versions[name]} asks for {part}{wanted.specifier}, "
                f"but {versions[part]} is installed"
            )
    return None
