"""All situations, by the chapters of docs/compatibility.md."""

from situations import behaviours, environments, launchers
from situations.situation import Situation

CHAPTERS: dict[str, list[Situation]] = {
    "Interpreters": environments.INTERPRETERS,
    "Shells": environments.SHELLS,
    "Folders, languages, shared memory": environments.FOLDERS,
    "Hosts, containers, addresses": environments.HOSTS,
    "torchrun and resilient-run": launchers.TORCHRUNS,
    "multiprocessing": launchers.MULTIPROCESSING,
    "Schedulers": launchers.SCHEDULERS,
    "Frameworks": launchers.FRAMEWORKS,
    "How the world is made": behaviours.WORLDS,
    "What a program does": behaviours.USES,
    "How it ends": behaviours.ENDS,
}
ALL = [situation for chapter in CHAPTERS.values() for situation in chapter]


def by_name(name: str) -> Situation:
    return next(situation for situation in ALL if situation.name == name)
