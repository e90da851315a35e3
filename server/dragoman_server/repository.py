"""The model repository: `<root>/<name>/<version>/manifest.json`; the highest version of every name is served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dragoman_bundle.bundle import load_bundle
from dragoman_bundle.manifest import MANIFEST, BundleError
from dragoman_server.errors import InvalidRequestError, NotFoundError
from dragoman_server.model import EngineSettings, Observe, ServedModel


class RepositoryError(Exception):
    """A repository that cannot be served; the message lists every problem of every bundle."""


class ModelRepository:
    """The models that a server has loaded.

    Args:
        models: of different names.
    """

    def __init__(self, models: list[ServedModel]) -> None:
        self.models = {model.name: model for model in sorted(models, key=lambda model: model.name)}

    def find(self, name: str, source: str, target: str) -> ServedModel:
        """The model for a request.

        Args:
            name: of the model; empty for whichever translates the pair.
            source: language.
            target: language.

        Raises:
            NotFoundError: there is none.
            InvalidRequestError: there are several, and no name.
        """
        if name and name not in self.models:
            raise NotFoundError(f"there is no model {name!r}; there is {', '.join(self.models)}")
        candidates = [self.models[name]] if name else list(self.models.values())
        fitting = [model for model in candidates if model.direction(source, target)]
        if not fitting:
            which = f"model {name}" if name else "no model"
            does = "does not translate" if name else "translates"
            raise NotFoundError(f"{which} {does} {source}→{target}; {_offer(candidates)}")
        if len(fitting) > 1:
            names = ", ".join(model.name for model in fitting)
            raise InvalidRequestError([f"several models translate {source}→{target}; set `model` to one of {names}"])
        return fitting[0]


def _offer(models: list[ServedModel]) -> str:
    pairs = sorted({f"{d.source}→{d.target}" for model in models for d in model.manifest.directions})
    return f"available: {', '.join(pairs)}"


def load_repository(root: Path, settings: EngineSettings, observe: Observe) -> ModelRepository:
    """Load and check the newest version of every model.

    Args:
        root: of the repository.
        settings: of every engine.
        observe: gives the observers of engines.

    Raises:
        RepositoryError: there is no model, or any of them is refused.
    """
    newest = list(_newest_versions(root))
    if not newest:
        raise RepositoryError(f"{root} holds no model; it must contain <name>/<version>/{MANIFEST}")
    models: list[ServedModel] = []
    problems = []
    for path in newest:
        try:
            models.append(_load(path, settings, observe))
        except BundleError as error:
            problems.append(str(error))
    names = [model.name for model in models]
    problems += [f"two directories hold a model named {name}" for name in sorted(set(names)) if names.count(name) > 1]
    if problems:
        raise RepositoryError("\n".join(problems))
    return ModelRepository(models)


def num_models(root: Path) -> int:
    """How many models `load_repository` would load."""
    return sum(1 for _ in _newest_versions(root))


def _load(path: Path, settings: EngineSettings, observe: Observe) -> ServedModel:
    bundle = load_bundle(path)
    variant = bundle.variant("cpu", settings.precision)
    if variant is None:
        have = ", ".join(f"{v.device}-{v.precision}" for v in bundle.manifest.variants)
        raise BundleError(path, [f"it has no cpu variant of precision {settings.precision or 'any'}; it has {have}"])
    return ServedModel(path.name, bundle, variant, settings, observe)


def _newest_versions(root: Path) -> Iterator[Path]:
    by_name: dict[Path, list[Path]] = {}
    for manifest in sorted(root.glob(f"*/*/{MANIFEST}")):
        by_name.setdefault(manifest.parent.parent, []).append(manifest.parent)
    for versions in by_name.values():
        yield max(versions, key=lambda path: _version_key(path.name))


def _version_key(version: str) -> list[tuple[int, str]]:
    """Orders 2 before 10 and 1.2 before 1.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[.-]", version)]
