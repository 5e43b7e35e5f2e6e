"""The cache of converted models: `<cache_dir>/models/<sha256 of the GGUF>/`."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from shared.engine.engine import ReportProgress
from shared.engine.model.convert import num_weight_bytes, write_config, write_weights
from shared.engine.model.digests import FileDigests, hash_file
from shared.engine.model.gguf import GgufFile
from shared.errors import ModelFault

MANIFEST = "slipstream.json"
FORMAT = 1
"""Goes up when a conversion would come out differently: older folders are then converted again."""
WEIGHTS = "model.safetensors"
SPARE_BYTES = 64 * 2**20


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a converted folder holds. Written last, so a folder with a manifest is whole."""

    format: int
    name: str
    source: str
    source_digest: str
    weight_digests: dict[str, str]
    tokenizer_digest: str
    file_bytes: dict[str, int]


class ModelCache:
    """Converted models by the sha256 of their source file."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self._models = cache_dir / "models"

    def folder(self, source_digest: str) -> Path:
        return self._models / source_digest

    def manifests(self) -> list[Manifest]:
        """Of every whole conversion."""
        found = (self._manifest(folder) for folder in sorted(self._models.glob("[0-9a-f]" * 64)))
        return [manifest for manifest in found if manifest is not None]

    def remove(self, folder: Path) -> None:
        """Forget a conversion."""
        shutil.rmtree(folder, ignore_errors=True)

    def find_or_convert(self, gguf_file: Path, name: str, report: ReportProgress) -> Manifest:
        """The manifest of the file's conversion; converts if there is none. Raises ModelFault, leaving nothing half-written."""
        digests = FileDigests(self._cache_dir)
        source_digest = digests.of(gguf_file)
        folder = self.folder(source_digest)
        manifest = self._manifest(folder)
        if manifest is not None:
            return manifest
        try:
            with self._lock(source_digest, report):
                manifest = self._manifest(folder)  # another process may have converted it meanwhile
                return manifest if manifest is not None else self._convert(gguf_file, source_digest, name, report)
        except OSError as error:
            raise _fault_of(error, self._models) from error

    def _convert(self, gguf_file: Path, source_digest: str, name: str, report: ReportProgress) -> Manifest:
        """Convert beside the place, then rename. The lock is held."""
        for left_over in self._models.glob(f".{source_digest}.*"):  # of a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        partial = self._models / f".{source_digest}.partial"
        gguf = GgufFile(gguf_file)
        try:
            self._check_room(num_weight_bytes(gguf))
            partial.mkdir()
            report("converting the model (once)", 0.0)
            architecture = write_config(gguf, partial)
            weights = write_weights(gguf, architecture, partial / WEIGHTS, report)
            manifest = Manifest(
                format=FORMAT,
                name=name,
                source=gguf_file.name,
                source_digest=source_digest,
                weight_digests={WEIGHTS: weights},
                tokenizer_digest=hash_file(partial / "tokenizer.json"),
                file_bytes={file.name: file.stat().st_size for file in partial.iterdir()},
            )
            (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
            self.remove(self.folder(source_digest))  # of an older format, or damaged
            partial.rename(self.folder(source_digest))
            return manifest
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _manifest(self, folder: Path) -> Manifest | None:
        """The folder's manifest, if it is of this format and every file has the size that it says."""
        try:
            manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
            whole = all((folder / name).stat().st_size == size for name, size in manifest.file_bytes.items())
        except (OSError, msgspec.DecodeError):
            return None
        return manifest if whole and manifest.format == FORMAT else None

    def _check_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self._models).free
        if free < num_bytes + SPARE_BYTES:
            raise OSError(errno.ENOSPC, f"{num_bytes / 2**20:.0f} MiB are needed, {free / 2**20:.0f} MiB are free")

    @contextmanager
    def _lock(self, source_digest: str, report: ReportProgress) -> Iterator[None]:
        """One process converts a file at a time; the kernel frees the lock of one that dies."""
        self._models.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._models / f"{source_digest}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report("waiting for another process that converts the model", None)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _fault_of(error: OSError, place: Path) -> ModelFault:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        cause, remedy = "no room for the converted model", "Free some space, or set SS_CACHE_DIR to another disk"
    else:
        cause, remedy = "cannot be written", "Set SS_CACHE_DIR to a folder that you may write"
    return ModelFault(f"{place}: {cause}: {error.strerror}", remedy=remedy)
