"""What a crash may leave of a recorded run: every state of a directory that the rules of file systems allow.

The rules are those of the strictest reading, so that what holds here holds on every file system:

- What was written to a file may be on the disk or not, for each 4 KiB page by itself and in any order, until the
  file's ``fsync`` or ``fdatasync`` has ended; a page that is not may hold what it held before, zeros, or rubbish.
- A file's size may be any that it has had since the last sync, or end at any page in between. ``fdatasync`` keeps what
  was written, but not that the file was cut shorter.
- That a name was made (a file's second one, too), removed, or renamed may be on the disk or not, each by itself and in
  any order, until the ``fsync`` of its directory has ended. A file's own ``fsync`` says nothing of its name.
- A rename, or an exchange of two names, is done as a whole or not at all: all journaling file systems promise that.

A call that has not ended at the time of the crash may have been done in part; one that begins before an ``fsync`` ends
is not made durable by it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crash.recording import Call, Note, number_of

PAGE = 4096
_RUBBISH = b"\xa5"


# ---- what was done ----


@dataclass(eq=False)
class Directory:
    """An inode that holds names.

    Attributes:
        number: in the order in which inodes were found or made.
    """

    number: int


@dataclass(eq=False)
class Write:
    begin: float
    end: float
    offset: int
    data: bytes


@dataclass(eq=False)
class Resize:
    """``is_least``: the file has at least this size, and keeps what it has beyond."""

    begin: float
    end: float
    size: int
    is_least: bool = False


@dataclass(eq=False)
class File:
    """An inode that holds bytes.

    Attributes:
        number: as of a Directory.
        content: what is in it, and durable, before anything is done.
        done: to its bytes, in order.
    """

    number: int
    content: bytes = b""
    done: list[Write | Resize] = field(default_factory=list)


Node = Directory | File
Slot = tuple[Directory, str]


@dataclass(eq=False)
class Naming:
    """What one call does to names: all of it, or nothing.

    Attributes:
        slots: what each name refers to afterwards.
    """

    begin: float
    end: float
    slots: dict[Slot, Node | None]
    text: str


@dataclass(eq=False)
class Sync:
    begin: float
    end: float
    node: Node | None  # None: everything
    is_full: bool = True


@dataclass
class Mark:
    time: float
    text: str


@dataclass
class Run:
    """A recorded run, as a model of what was done.

    Attributes:
        root: the directory that was recorded.
        slots: what was there, and durable, when it began.
    """

    root: Directory
    slots: dict[Slot, Node]
    files: list[File]
    namings: list[Naming]
    syncs: list[Sync]
    marks: list[Mark]


class Snapshot:
    """What is below a directory."""

    def __init__(self, root: Path) -> None:
        self.numbers: dict[int, Node] = {}
        self.slots: dict[Slot, Node] = {}
        self.root = self._take(root)
        assert isinstance(self.root, Directory)

    def _take(self, path: Path) -> Node:
        number = len(self.numbers)
        node: Node = Directory(number) if path.is_dir() else File(number, path.read_bytes())
        self.numbers[number_of(path.stat())] = node
        if isinstance(node, Directory):
            for entry in sorted(path.iterdir()):
                self.slots[node, entry.name] = self._take(entry)
        return node


def understand(before: Snapshot, notes: Sequence[Note]) -> Run:
    """The run that these notes tell of. What they tell of other directories is left out."""
    return _Reading(before).read(notes)


class _Reading:
    def __init__(self, before: Snapshot) -> None:
        assert isinstance(before.root, Directory)
        self._nodes = dict(before.numbers)
        self._next = len(self._nodes)
        self._now = dict(before.slots)
        self._submitted: dict[tuple[int, int], Write] = {}
        files = [node for node in before.numbers.values() if isinstance(node, File)]
        self._run = Run(before.root, dict(before.slots), files, [], [], [])

    def read(self, notes: Sequence[Note]) -> Run:
        for note in notes:
            if note.call == Call.MARK:
                self._run.marks.append(Mark(note.begin, note.name))
            elif note.call == Call.SYNC_ALL:
                self._run.syncs.append(Sync(note.begin, note.end, None))
            elif note.call == Call.COMPLETE:
                self._complete(note)
            elif note.directory in self._nodes:
                self._name(note)
            elif note.inode in self._nodes:
                self._change(note)
        return self._run

    def _name(self, note: Note) -> None:
        above = self._nodes[note.directory]
        assert isinstance(above, Directory)
        slot = (above, note.name)
        slots: dict[Slot, Node | None] = {}
        if note.call in (Call.CREATE, Call.MKDIR):
            number, self._next = self._next, self._next + 1
            node: Node = Directory(number) if note.call == Call.MKDIR else File(number)
            self._nodes[note.inode] = slots[slot] = node
            if isinstance(node, File):
                self._run.files.append(node)
        elif note.call == Call.LINK:
            slots[slot] = self._nodes[note.inode]
        elif note.call == Call.UNLINK:
            slots[slot] = None
        else:
            other = self._nodes[note.id or note.directory]
            assert isinstance(other, Directory)
            to = (other, note.other)
            slots = {slot: self._now.get(to) if note.call == Call.EXCHANGE else None, to: self._now[slot]}
        for changed, value in slots.items():
            if value is None:
                del self._now[changed]
            else:
                self._now[changed] = value
        text = f"{note.call.name.lower()} {note.name} {note.other}".rstrip()
        self._run.namings.append(Naming(note.begin, note.end, slots, text))

    def _change(self, note: Note) -> None:
        node = self._nodes[note.inode]
        if note.call in (Call.FSYNC, Call.FDATASYNC):
            self._run.syncs.append(Sync(note.begin, note.end, node, note.call == Call.FSYNC))
            return
        assert isinstance(node, File), f"{note.call} of a directory"
        if note.call in (Call.RESIZE, Call.ALLOCATE):
            node.done.append(Resize(note.begin, note.end, note.size, note.call == Call.ALLOCATE))
            return
        write = Write(note.begin, note.end if note.call == Call.WRITE else math.inf, note.offset, note.data)
        known = self._submitted.get((note.process, note.id))
        if note.call == Call.SUBMIT and known is not None and known in node.done:
            node.done.remove(known)  # it was never taken, and is submitted again
        node.done.append(write)
        if note.call == Call.SUBMIT:
            self._submitted[note.process, note.id] = write

    def _complete(self, note: Note) -> None:
        write = self._submitted.pop((note.process, note.id), None)
        if write is not None:  # else it was a read
            write.end = note.end
            write.data = write.data[: note.size]


# ---- trees ----

Tree = dict[str, str | None]
"""Paths below the root, with the digest of a file's content; None for a directory."""


class Store:
    """Contents by digest, and directories made of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._digests: dict[bytes, str] = {}
        self._contents: dict[str, bytes] = {}

    def add(self, content: bytes) -> str:
        digest = self._digests.get(content)
        if digest is None:
            digest = self._digests[content] = hashlib.blake2b(content, digest_size=12).hexdigest()
            self._contents[digest] = content
            (self._folder / digest).write_bytes(content)
        return digest

    def content(self, digest: str) -> bytes:
        return self._contents[digest]

    def make(self, tree: Tree, where: Path, *, may_change: bool = False) -> None:
        """Makes a directory of it. Its files are links, unless they may be changed."""
        where.mkdir()
        for path, digest in sorted(tree.items()):
            if digest is None:
                (where / path).mkdir()
            elif may_change:
                (where / path).write_bytes((self._folder / digest).read_bytes())
            else:
                os.link(self._folder / digest, where / path)


def tree_of(where: Path, store: Store) -> Tree:
    """What a real directory holds."""
    return {
        str(path.relative_to(where)): None if path.is_dir() else store.add(path.read_bytes())
        for path in sorted(where.rglob("*"))
    }


def _walk(root: Directory, slots: dict[Slot, Node]) -> Iterator[tuple[str, Node]]:
    """Everything that names lead to from the root."""
    children: dict[Directory, list[tuple[str, Node]]] = {}
    for (above, name), node in slots.items():
        children.setdefault(above, []).append((name, node))
    stack: list[tuple[str, Node]] = [("", root)]
    while stack:
        path, node = stack.pop()
        if path:
            yield path, node
        if isinstance(node, Directory):
            stack += [(f"{path}/{name}" if path else name, child) for name, child in children.get(node, ())]


def _sizes(size: int, done: Sequence[Write | Resize]) -> list[int]:
    """A file's size at first, and after each thing that was done to it."""
    found = [size]
    for one in done:
        if isinstance(one, Write):
            size = max(size, one.offset + len(one.data))
        else:
            size = max(size, one.size) if one.is_least else one.size
        found.append(size)
    return found


def replayed(run: Run, store: Store) -> Tree:
    """What is there when everything has been done."""
    slots: dict[Slot, Node] = dict(run.slots)
    for naming in run.namings:
        _apply(slots, naming)
    return {
        path: store.add(content_of(node, node.done)) if isinstance(node, File) else None
        for path, node in _walk(run.root, slots)
    }


def _apply(slots: dict[Slot, Node], naming: Naming) -> None:
    for slot, node in naming.slots.items():
        if node is None:
            slots.pop(slot, None)
        else:
            slots[slot] = node


def content_of(file: File, done: Sequence[Write | Resize]) -> bytes:
    """A file's bytes when these things have been done to it, in order."""
    content = bytearray(file.content)
    for one in done:
        if isinstance(one, Resize):
            size = max(len(content), one.size) if one.is_least else one.size
            del content[size:]
            content.extend(bytes(size - len(content)))
            continue
        content.extend(bytes(max(0, one.offset + len(one.data) - len(content))))
        content[one.offset : one.offset + len(one.data)] = one.data
    return bytes(content)


# ---- crashes ----


@dataclass(frozen=True)
class Bounds:
    """How many states to make at most, where there are more.

    Attributes:
        namings: choices of which names have changed, at each point in time.
        contents: of each file.
        states: at each point; each choice of names gets a share of combinations of contents.
        skips: look at one only of the states that differ in files that no other file names.
    """

    namings: int
    contents: int
    states: int
    skips: bool


QUICK = Bounds(namings=128, contents=8, states=250, skips=True)
FULL = Bounds(namings=1024, contents=40, states=2500, skips=False)
_LEAST_COMBINED = 4


@dataclass
class State:
    """What a crash leaves.

    Attributes:
        time: of the crash.
        tree: what is there then.
        lost: the calls on names that were not durable, and are lost; for people.
    """

    time: float
    tree: Tree
    lost: tuple[str, ...]


class Crashes:
    """The states that crashes of a run may leave.

    Args:
        loses: False: the machine goes on, only the processes are killed: nothing that was done is lost.
    """

    def __init__(self, run: Run, store: Store, bounds: Bounds, chance: random.Random, loses: bool = True) -> None:
        self._run = run
        self.store = store
        self._bounds = bounds
        self._chance = chance
        self._loses = loses
        self._contents: dict[tuple[File, float], list[str]] = {}

    def times(self) -> list[float]:
        """Crashes at these times leave every state that crashes at any time do.

        Something that begins adds states, and a sync that ends takes some away: so the moment before each of the latter
        has all that came before it. Marks divide what may be there, so the moments of marks are looked at too.
        """
        ends = {sync.end for sync in self._run.syncs} | {mark.time for mark in self._run.marks}
        if not self._loses:
            everything = [*self._run.namings, *(one for file in self._run.files for one in file.done)]
            ends |= {one.end for one in everything}
        return [*sorted(ends), math.inf]

    def at(self, time: float) -> Iterator[State]:
        """States that a crash at this time may leave, each once."""
        chosen: dict[frozenset[tuple[str, Node]], tuple[str, ...]] = {}
        for slots, lost in self._names(time):
            chosen.setdefault(frozenset(_walk(self._run.root, slots)), lost)
        share = max(_LEAST_COMBINED, self._bounds.states // len(chosen))
        for reached, lost in chosen.items():
            yield from self._with_contents(dict(sorted(reached, key=lambda pair: pair[1].number)), lost, time, share)

    # ---- names ----

    def _names(self, time: float) -> Iterator[tuple[dict[Slot, Node], tuple[str, ...]]]:
        """What names may refer to."""
        begun = [naming for naming in self._run.namings if naming.begin < time]
        open_ones = [naming for naming in begun if not self._is_durable(naming, time)]
        for kept in self._choices(len(open_ones)):
            lost = {naming for naming, is_kept in zip(open_ones, kept, strict=True) if not is_kept}
            slots: dict[Slot, Node] = dict(self._run.slots)
            for naming in begun:
                if naming not in lost:
                    _apply(slots, naming)
            yield slots, tuple(naming.text for naming in open_ones if naming in lost)

    def _choices(self, count: int) -> Iterator[Sequence[bool]]:
        """Which of so many calls are kept: all choices, or where these are too many the likeliest and some others."""
        if 1 << count <= self._bounds.namings:
            yield from itertools.product((True, False), repeat=count)
            return
        for first in range(count + 1):  # in order, as journals keep them; and the reverse
            yield [number < first for number in range(count)]
            yield [number >= first for number in range(count)]
        for one in range(count):
            yield [number == one for number in range(count)]
            yield [number != one for number in range(count)]
        for _ in range(max(0, self._bounds.namings - 4 * count)):
            likely = self._chance.random()
            yield [self._chance.random() < likely for _ in range(count)]

    def _is_durable(self, naming: Naming, time: float) -> bool:
        if not self._loses:
            return naming.end < time
        directories = {above for above, _ in naming.slots}
        return all(self._synced(above, naming.end, time, needs_full=False) for above in directories)

    def _synced(self, node: Node, done: float, time: float, needs_full: bool) -> bool:
        """Whether what was done to it by then is durable at this time."""
        return any(
            sync.node in (node, None) and sync.begin >= done and sync.end < time and (sync.is_full or not needs_full)
            for sync in self._run.syncs
        )

    # ---- contents ----

    def _with_contents(
        self, reached: dict[str, Node], lost: tuple[str, ...], time: float, share: int
    ) -> Iterator[State]:
        files = [(path, node) for path, node in reached.items() if isinstance(node, File)]
        choices = [self._contents_of(node, time) for _, node in files]
        directories: Tree = {path: None for path, node in reached.items() if not isinstance(node, File)}
        for chosen in self._combinations(choices, share):
            tree = directories | {path: digest for (path, _), digest in zip(files, chosen, strict=True)}
            yield State(time, tree, lost)

    def _combinations(self, choices: list[list[str]], most: int) -> Iterator[Sequence[str]]:
        if math.prod(map(len, choices)) <= most:
            yield from itertools.product(*choices)
            return
        yield [each[0] for each in choices]
        yield [each[-1] for each in choices]
        alone = [(number, content) for number, each in enumerate(choices) for content in each[1:]]
        for number, content in self._chance.sample(alone, min(len(alone), most // 2)):  # all is there, but of one file
            yield [content if at == number else each[0] for at, each in enumerate(choices)]
        for _ in range(most // 2):
            yield [self._chance.choice(each) for each in choices]

    def _contents_of(self, file: File, time: float) -> list[str]:
        """Digests of what the file may hold; all that was written first, and nothing of it last."""
        begun = [one for one in file.done if one.begin < time]
        if all(self._is_kept(file, one, time) for one in begun):
            return [self.store.add(content_of(file, begun))]
        if not self._loses:
            ended = [one for one in begun if one.end < time]
            return [self.store.add(content_of(file, some)) for some in (begun, ended)]
        key = (file, time)
        if key not in self._contents:
            pages = _Pages(file, begun, [self._is_kept(file, one, time) for one in begun])
            first, last = self.store.add(pages.everything), self.store.add(pages.nothing)
            found = {first: None}
            for content in itertools.islice(pages.contents(self._chance), 4 * self._bounds.contents):
                if len(found) < self._bounds.contents:
                    found.setdefault(self.store.add(content))
            found.pop(last, None)
            self._contents[key] = [*found, last] if first != last else [*found, first]
        return self._contents[key]

    def _is_kept(self, file: File, one: Write | Resize, time: float) -> bool:
        if not self._loses:
            return one.end < time
        is_cut = isinstance(one, Resize) and not one.is_least
        return self._synced(file, one.end, time, needs_full=is_cut)


class _Pages:
    """What a file may hold of which some writes are durable and others are not.

    Attributes:
        everything: what it holds if nothing is lost.
        nothing: what it holds if all is lost that may be.
    """

    def __init__(self, file: File, done: Sequence[Write | Resize], kept: Sequence[bool]) -> None:
        durable = [one for one, is_kept in zip(done, kept, strict=True) if is_kept]
        self.everything = content_of(file, done)
        self.nothing = content_of(file, durable)
        first = 1 + max((number for number, is_kept in enumerate(kept) if is_kept), default=-1)
        sizes = {*_sizes(len(file.content), done)[first:], len(self.everything), len(self.nothing)}
        writes = [one for one in done if isinstance(one, Write) and one not in durable]
        self._pages = sorted({page for one in writes for page in _pages_of(one)})
        between = {page * PAGE for page in self._pages if min(sizes) < page * PAGE < max(sizes)}
        self._sizes = sorted(sizes | between)

    def contents(self, chance: random.Random) -> Iterator[bytes]:
        """The likeliest first, then any, some of them several times."""
        every, final = set(self._pages), len(self.everything)
        yield self._made(set(), final, _RUBBISH)
        yield self._made(set(), final, b"\0")
        for size in {self._sizes[0], self._sizes[len(self._sizes) // 2], self._sizes[-1]}:
            yield self._made(set(), size, b"\0")
            yield self._made(every, size, b"\0")
        for page in {*self._pages[:1], *self._pages[-1:]}:  # one page is lost, or has come alone
            yield self._made(every - {page}, final, b"\0")
            yield self._made({page}, final, _RUBBISH)
        while True:
            likely = chance.random()
            here = {page for page in self._pages if chance.random() < likely}
            yield self._made(here, chance.choice(self._sizes), chance.choice((b"\0", _RUBBISH)))

    def _made(self, pages: set[int], size: int, fill: bytes) -> bytes:
        """Of the pages that were written, these are there; others hold what they did before, or what fills them."""
        content = bytearray(self.nothing[:size].ljust(size, b"\0"))
        for page in self._pages:
            begin, end = min(page * PAGE, size), min((page + 1) * PAGE, size)
            if page in pages:
                content[begin:end] = self.everything[begin:end].ljust(end - begin, b"\0")
            else:
                begin = max(begin, len(self.nothing))
                content[begin:end] = fill * max(0, end - begin)
        return bytes(content)


def _pages_of(write: Write) -> range:
    return range(write.offset // PAGE, -(-(write.offset + len(write.data)) // PAGE))
