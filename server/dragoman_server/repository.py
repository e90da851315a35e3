"""The models that are served: loaded versions, where calls go, and how versions come and go while others serve.

A repository on disk is `<root>/<name>/<version>/manifest.json`. At the start the newest version of every name is loaded
and becomes its stable one, unless `<root>/<name>/routing.toml` says which versions to load:

    stable = "3"
    canary = "4"          # optional
    canary_share = 0.05   # of the calls that name no version
"""

from __future__ import annotations

import asyncio
import random
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dragoman_bundle.manifest import MANIFEST, BundleError
from dragoman_server.errors import FailedPreconditionError, InvalidRequestError, NotFoundError, RefusedBundleError
from dragoman_server.model import ServedModel

STABLE, CANARY = "stable", "canary"
_ROUTING_FILE = "routing.toml"


class RepositoryError(Exception):
    """A repository that cannot be served; the message lists every problem of every bundle."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the calls for a model go that name no version."""

    stable: str
    canary: str = ""
    """Empty: none."""
    canary_share: float = 0.0
    """Of those calls, 0 to 1."""

    def problems(self, versions: set[str]) -> Iterator[str]:
        """What is wrong with it, given the versions there are."""
        for label, version in ((STABLE, self.stable), (CANARY, self.canary)):
            if version not in versions and (version or label == STABLE):
                yield f"{label} is {version!r}, which is none of {', '.join(sorted(versions))}"
        if self.canary and self.canary == self.stable:
            yield f"{CANARY} is {self.canary!r}, and so is {STABLE}"
        if not 0 <= self.canary_share <= 1:
            yield f"canary_share is {self.canary_share:g}, it must be 0 to 1"
        if self.canary_share and not self.canary:
            yield f"canary_share is {self.canary_share:g}, but there is no canary"

    def choose(self, draw: float) -> str:
        """The version for a call; `draw` is uniform in [0, 1)."""
        return self.canary if draw < self.canary_share else self.stable

    def resolve(self, version: str) -> str:
        """The version that a label stands for; a version stands for itself."""
        return {STABLE: self.stable, CANARY: self.canary or CANARY}.get(version, version)


@dataclass(slots=True)
class _Versions:
    """The loaded versions of one model."""

    routing: Routing
    loaded: dict[str, ServedModel] = field(default_factory=dict)


Load = Callable[[Path], ServedModel]
"""Loads and checks a bundle; takes seconds."""


class ModelRepository:
    """The models that a server has loaded. Everything but the loading itself happens on the event loop.

    Args:
        root: of the repository on disk.
        load: a bundle.
    """

    def __init__(self, root: Path, load: Load) -> None:
        self._root = root
        self._load = load
        self._names: dict[str, _Versions] = {}
        self._changing = asyncio.Lock()
        self._retirements: set[asyncio.Task[None]] = set()
        self._random = random.Random()  # noqa: S311 - which of two versions answers is no secret

    def load_all(self) -> None:
        """Load what the repository says is to be served.

        Raises:
            RepositoryError: there is no model, or any of them is refused.
        """
        problems: list[str] = []
        for name, routing in _configured(self._root, problems):
            for version in filter(None, (routing.stable, routing.canary)):
                try:
                    self._add(self._load(self._root / name / version), routing)
                except BundleError as error:
                    problems.append(str(error))
        if not self._names and not problems:
            raise RepositoryError(f"{self._root} holds no model; it must contain <name>/<version>/{MANIFEST}")
        if problems:
            raise RepositoryError("\n".join(problems))

    def _add(self, model: ServedModel, routing: Routing) -> None:
        self._names.setdefault(model.name, _Versions(routing)).loaded[model.version] = model

    def __iter__(self) -> Iterator[ServedModel]:
        for _, versions in sorted(self._names.items()):
            yield from (versions.loaded[version] for version in sorted(versions.loaded, key=_version_key))

    def labels(self, model: ServedModel) -> list[str]:
        """What a version is called besides its own name."""
        routing = self._names[model.name].routing
        return [label for label in (STABLE, CANARY) if getattr(routing, label) == model.version]

    def traffic_share(self, model: ServedModel) -> float:
        """Share of the calls that name no version which come to this one."""
        routing = self._names[model.name].routing
        shares = {routing.stable: 1 - routing.canary_share, routing.canary: routing.canary_share}
        return shares.get(model.version, 0.0)

    def get(self, name: str, version: str = "") -> ServedModel:
        """A loaded model by name and version or label; the stable one without.

        Raises:
            NotFoundError: there is none.
        """
        if name not in self._names:
            raise NotFoundError(f"there is no model {name!r}; there is {', '.join(sorted(self._names)) or 'none'}")
        versions = self._names[name]
        resolved = versions.routing.resolve(version or STABLE)
        if resolved not in versions.loaded:
            have = ", ".join(sorted(versions.loaded, key=_version_key))
            raise NotFoundError(f"model {name} has no version {version!r} loaded; it has {have}")
        return versions.loaded[resolved]

    def _choose(self, name: str, version: str) -> ServedModel:
        if version or name not in self._names:
            return self.get(name, version)
        return self.get(name, self._names[name].routing.choose(self._random.random()))

    def lease(self, name: str, version: str, source: str, target: str) -> ServedModel:
        """The model for a call; entered as a context manager, it stays until the end even if it is being unloaded.

        Args:
            name: of the model; empty for whichever translates the pair.
            version: or a label; empty to go where the routing says.
            source: language.
            target: language.

        Raises:
            NotFoundError: there is none.
            InvalidRequestError: there are several, and no name.
        """
        if version and not name:
            raise InvalidRequestError(["model_version is set, but model is not; name the model as well"])
        candidates = [self._choose(each, version) for each in ([name] if name else sorted(self._names))]
        fitting = [model for model in candidates if model.direction(source, target)]
        if not fitting:
            which = f"model {name}" if name else "no model"
            does = "does not translate" if name else "translates"
            raise NotFoundError(f"{which} {does} {source}→{target}; {_offer(candidates)}")
        if len(fitting) > 1:
            names = ", ".join(model.name for model in fitting)
            raise InvalidRequestError(
                [f"model is not set, and several translate {source}→{target}; choose from {names}"]
            )
        return fitting[0]

    def on_disk(self) -> Iterator[tuple[str, str, bool]]:
        """Names and versions in the repository, and whether they are loaded."""
        for name, versions in sorted(_versions(self._root).items()):
            loaded = self._names[name].loaded if name in self._names else {}
            for version in versions:
                yield name, version, version in loaded

    async def load(self, name: str, version: str, label: str, ready: Callable[[ServedModel], None]) -> ServedModel:
        """Load a version beside the others, and let calls come to it if `label` is "stable".

        Args:
            name: of the model.
            version: empty for the newest.
            label: "stable", or empty to leave the routing as it is.
            ready: is given the model to start it, before any call can come to it.

        Raises:
            InvalidRequestError: the label is not "stable" or empty.
            NotFoundError: the repository has no such version.
            FailedPreconditionError: it is loaded already.
            RefusedBundleError: it is damaged, or does not answer as it should.
        """
        if label not in {"", STABLE}:
            raise InvalidRequestError([f"label is {label!r}; it must be {STABLE!r} or empty"])
        async with self._changing:
            version = self._known_version(name, version)
            if name in self._names and version in self._names[name].loaded:
                raise FailedPreconditionError(f"model {name} version {version} is loaded already")
            try:
                model = await asyncio.to_thread(self._load, self._root / name / version)
            except BundleError as error:
                raise RefusedBundleError(str(error)) from error
            ready(model)
            self._add(model, Routing(version))
            if label == STABLE:
                versions = self._names[name]
                canary = versions.routing.canary if versions.routing.canary != version else ""
                versions.routing = Routing(version, canary, versions.routing.canary_share if canary else 0.0)
            return model

    def _known_version(self, name: str, version: str) -> str:
        known = _versions(self._root).get(name, [])
        if not known or (version and version not in known):
            have = f"it has {', '.join(known)}" if known else "there is no such model"
            raise NotFoundError(f"the repository has no version {version!r} of {name!r}; {have}")
        return version or known[-1]

    async def unload(self, name: str, version: str, gone: Callable[[ServedModel], None]) -> None:
        """Let no more calls come to a version, wait for those that it works on, and stop it.

        Once begun it is carried through, whether or not anybody waits for it.

        Args:
            name: of the model.
            version: or label.
            gone: is told when nothing is left of it.

        Raises:
            NotFoundError: it is not loaded.
            FailedPreconditionError: calls without a version go to it, and others are loaded.
        """
        async with self._changing:
            model = self.get(name, version)
            versions = self._names[name]
            if model.version == versions.routing.stable and len(versions.loaded) > 1:
                raise FailedPreconditionError(
                    f"version {model.version} is the stable one of {name}; make another one stable first"
                )
            if model.version == versions.routing.canary:
                versions.routing = Routing(versions.routing.stable)
            del versions.loaded[model.version]
            if not versions.loaded:
                del self._names[name]
        retirement = asyncio.create_task(_retire(model, gone))
        self._retirements.add(retirement)
        retirement.add_done_callback(self._retirements.discard)
        await asyncio.shield(retirement)

    async def set_routing(self, name: str, routing: Routing) -> None:
        """Say where calls go that name no version.

        Raises:
            NotFoundError: there is no such model.
            InvalidRequestError: the routing names versions that are not loaded, or an impossible share.
        """
        async with self._changing:
            self.get(name)
            versions = self._names[name]
            if problems := [f"routing.{problem}" for problem in routing.problems(set(versions.loaded))]:
                raise InvalidRequestError(problems)
            versions.routing = routing


async def _retire(model: ServedModel, gone: Callable[[ServedModel], None]) -> None:
    await model.wait_until_unused()
    await asyncio.to_thread(model.engine.stop)
    gone(model)


def _offer(models: list[ServedModel]) -> str:
    pairs = sorted({f"{d.source}→{d.target}" for model in models for d in model.manifest.directions})
    return f"available: {', '.join(pairs) or 'nothing'}"


def num_models(root: Path) -> int:
    """How many models a repository has, versions of one name counted once."""
    return len(_versions(root))


def _versions(root: Path) -> dict[str, list[str]]:
    """Versions by name, oldest first."""
    found: dict[str, list[str]] = {}
    for manifest in root.glob(f"*/*/{MANIFEST}"):
        found.setdefault(manifest.parent.parent.name, []).append(manifest.parent.name)
    return {name: sorted(versions, key=_version_key) for name, versions in found.items()}


def _configured(root: Path, problems: list[str]) -> Iterator[tuple[str, Routing]]:
    """What is to be served, by name; `problems` collects what is wrong with routing files."""
    for name, versions in sorted(_versions(root).items()):
        path = root / name / _ROUTING_FILE
        routing = _read_routing(path, problems) if path.exists() else Routing(versions[-1])
        if routing is not None:
            wrong = list(routing.problems(set(versions)))
            problems += [f"{path}: {problem}" for problem in wrong]
            if not wrong:
                yield name, routing


def _read_routing(path: Path, problems: list[str]) -> Routing | None:
    kinds: dict[str, tuple[type, ...]] = {STABLE: (str,), CANARY: (str,), "canary_share": (int, float)}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path}: {error}")
        return None
    wrong = [f"{path}: {key} is not a setting; there are {', '.join(kinds)}" for key in table if key not in kinds]
    wrong += [
        f"{path}: {key} has the wrong type, {type(table[key]).__name__}"
        for key, kind in kinds.items()
        if key in table and (not isinstance(table[key], kind) or isinstance(table[key], bool))
    ]
    if STABLE not in table:
        wrong.append(f"{path}: {STABLE} is missing")
    problems += wrong
    return None if wrong else Routing(**table)


def _version_key(version: str) -> list[tuple[int, str]]:
    """Orders 2 before 10 and 1.2 before 1.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[.-]", version)]
