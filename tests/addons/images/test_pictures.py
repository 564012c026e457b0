"""Bytes and pixels of pictures, those that are broken, and the store of their bytes."""

import base64
import json
import os
import socketserver
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from dschat_lora.addons.images.pictures import (
    Limits,
    Picture,
    PictureStore,
    digest,
    open_picture,
    picture_of,
    read,
)


def drawn(mode="RGB", size=(7, 5)):
    """A picture of which no turn or flip is the same."""
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    return Image.fromarray(noise, "RGBA").convert("RGB").convert(mode)


def encoded(image, kind="PNG", **options):
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def palette():
    image = drawn("P")
    image.info["transparency"] = bytes(range(256))
    return image


def sixteen():
    return Image.fromarray(np.arange(35, dtype=np.uint16).reshape(5, 7) * 1800)


GOOD = {
    "png": encoded(drawn()),
    "png, alpha": encoded(drawn().convert("RGBA")),
    "png, grey": encoded(drawn("L")),
    "png, grey with a transparent value": encoded(drawn("L"), transparency=3),
    "png, transparent colour": encoded(drawn(), transparency=(1, 2, 3)),
    "png, palette with transparency": encoded(palette()),
    "png, 16 bits": encoded(sixteen()),
    "png, one bit": encoded(drawn("1")),
    **{f"jpeg, turned {n}": encoded(drawn(), "JPEG", exif=turned(n)) for n in range(1, 9)},
    "png, turned": encoded(drawn(), "PNG", exif=turned(6)),
    "jpeg, CMYK": encoded(drawn("CMYK"), "JPEG"),
    "jpeg, progressive": encoded(drawn(), "JPEG", progressive=True),
    "mpo": encoded(drawn(), "MPO", save_all=True, append_images=[drawn("L").convert("RGB")]),
    "webp": encoded(drawn(), "WEBP", lossless=True, exif=turned(3)),
    "webp that moves": encoded(drawn(), "WEBP", save_all=True, append_images=[drawn("1")]),
    "gif that moves": encoded(drawn("P"), "GIF", save_all=True, append_images=[drawn("L")]),
    "bmp": encoded(drawn(), "BMP"),
    "tiff, float": encoded(drawn("F"), "TIFF"),
    "tiff, two pages": encoded(drawn(), "TIFF", save_all=True, append_images=[drawn("L")]),
    "ppm": encoded(drawn(), "PPM"),
    "avif": encoded(drawn(), "AVIF", quality=100),
    "jpeg2000": encoded(drawn(), "JPEG2000"),
}


@pytest.mark.parametrize("name", GOOD)
def test_pixels_are_those_of_transformers(tmp_path, name):
    (tmp_path / "picture").write_bytes(GOOD[name])
    wanted = load_image(str(tmp_path / "picture"))
    image = open_picture(GOOD[name])
    assert (image.mode, image.size) == ("RGB", wanted.size)
    assert image.tobytes() == wanted.tobytes()
    # PIL images of rows in memory come as PNG.
    again = read(Picture(image=Image.open(BytesIO(GOOD[name]))))
    assert again.startswith(b"\x89PNG")
    assert open_picture(again).tobytes() == wanted.tobytes()


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width, height, *chunks, rows=b""):
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = [chunk(b"IHDR", head), *chunks, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def bmp_of(width, height):
    """A BMP whose pixels are not there."""
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + head


GIF = encoded(drawn("P"), "GIF")
JPEG, PNG = GOOD["jpeg, turned 1"], GOOD["png"]
PIXELS = "pixels; 1 to 50,000,000 are allowed (--max_image_pixels)"
NONE = "it is not PNG, JPEG, WEBP, GIF, BMP, TIFF, PPM, AVIF, JPEG2000; it begins with"
BAD = {
    "text": (b"hello", f"picture 'a.png': {NONE} b'hello'"),
    "json": (b'{"error": 404, "message": 1}', """it begins with b'{"error": 404, "'"""),
    "page": (b"<!DOCTYPE html><html>", f"{NONE} b'<!DOCTYPE html><'"),
    "one byte": (b"\x89", f"{NONE} b'\\x89'"),
    "nothing": (b"", f"{NONE} b''"),
    "zeros": (bytes(1000), NONE),
    "svg": (
        b"<?xml version='1.0'?>\n<SVG xmlns=''>",
        "it is SVG, which is not supported; convert it to",
    ),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid", "it is a pointer of Git LFS; `git"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", NONE),
    "pdf": (b"%PDF-1.7\n", f"{NONE} b'%PDF-1.7\\n'"),
    "psd": (b"8BPS" + bytes(40), NONE),
    "icon": (b"\0\0\1\0" + bytes(40), NONE),
    "heic": (b"\0\0\0\x18ftypheic" + bytes(40), NONE),
    "zip": (b"PK\3\4" + bytes(40), NONE),
    "png, cut": (PNG[:-30], "picture 'a.png': "),
    "png, header alone": (PNG[:33], "picture 'a.png': "),
    "png, half a header": (PNG[:20], "picture 'a.png': "),
    "png, wrong checksum": (PNG[:29] + b"\0\0\0\0" + PNG[33:], "picture 'a.png': "),
    "png, too few rows": (png_of(9, 9, rows=bytes(5)), "picture 'a.png': "),
    "png, no width": (png_of(0, 9), NONE),
    "png, bomb": (png_of(10_000, 10_000), f"it has 10,000 x 10,000 {PIXELS}"),
    "png, bomb of one line": (png_of(2**31 - 1, 1), "it has more than 178,956,970 pixels"),
    "png, bomb of Pillow": (png_of(60_000, 60_000), "it has more than 178,956,970 pixels"),
    "png, bomb of text": (
        png_of(9, 9, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**21)))),
        "picture 'a.png': ",
    ),
    "png, just too large": (png_of(50_000_001, 1), f"it has 50,000,001 x 1 {PIXELS}"),
    "bmp, bomb": (bmp_of(9_000, 9_000), f"it has 9,000 x 9,000 {PIXELS}"),
    "bmp, no pixels": (bmp_of(9, 9), "picture 'a.png': "),
    "bmp, no height": (bmp_of(9, 0), "picture 'a.png': "),
    "jpeg, cut": (JPEG[:-200], "picture 'a.png': "),
    "jpeg, header alone": (JPEG[:40], "picture 'a.png': "),
    "jpeg, of text": (b"\xff\xd8\xff" + b"text" * 9, "picture 'a.png': "),
    "gif, cut": (GIF[: len(GIF) // 2], "picture 'a.png': "),
    "gif, header alone": (b"GIF89a" + bytes(7), "picture 'a.png': "),
    "webp, cut": (GOOD["webp"][:60], "picture 'a.png': "),
    "webp, header alone": (b"RIFF\x10\0\0\0WEBPVP8 ", "picture 'a.png': "),
    "tiff, no directory": (b"II*\0\x08\0\0\0", "picture 'a.png': "),
    "tiff, circle": (b"II*\0\x08\0\0\0\1\0" + bytes(12) + b"\x08\0\0\0", "picture 'a.png': "),
    "tiff, cut": (GOOD["tiff, float"][:80], "picture 'a.png': "),
    "ppm, bomb": (b"P6 99999 9999 255\n", "it has more than 178,956,970 pixels"),
    "ppm, no pixels": (b"P6 3 3 255\n", "picture 'a.png': "),
    "ppm, words": (b"P6 three 3 255\n", "picture 'a.png': "),
    "avif, cut": (GOOD["avif"][:100], "picture 'a.png': "),
    "jpeg2000, cut": (GOOD["jpeg2000"][:90], "picture 'a.png': "),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_one_line_with_its_name(name, recwarn):
    data, reason = BAD[name]
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared
        open_picture(data, name="picture 'a.png'")
    line = str(error.value)
    assert line.startswith("picture 'a.png': ")
    assert reason in line
    assert line.isprintable()
    assert len(line) < 300
    assert "0x" not in line  # no address of an object
    assert not [each for each in recwarn if each.category is Image.DecompressionBombWarning]


def test_pixels_are_counted_before_they_are_decoded(monkeypatch):
    from PIL import ImageFile

    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    limits = Limits(max_pixels=34)
    for name in ("png", "jpeg, turned 6", "gif that moves", "bmp", "webp", "tiff, float"):
        with pytest.raises(ValueError, match=r": it has 7 x 5 pixels; 1 to 34 are allowed"):
            open_picture(GOOD[name], limits)
        with pytest.raises(ValueError, match=r"picture in memory: it has 7 x 5 pixels"):
            read(Picture(image=Image.open(BytesIO(GOOD[name]))), limits)
    monkeypatch.undo()
    assert open_picture(GOOD["png"], Limits(max_pixels=35)).size == (7, 5)


def test_pil_images_of_equal_pixels_have_equal_bytes():
    images = [drawn(), Image.open(BytesIO(GOOD["png, transparent colour"]))]
    images.append(Image.open(BytesIO(encoded(drawn(), icc_profile=b"profile", dpi=(9, 9)))))
    assert len({read(Picture(image=image)) for image in images}) == 1


def test_a_broken_pil_image_is_one_line():
    closed = drawn()
    closed.close()
    for image in (Image.open(BytesIO(PNG[:-30])), closed, Image.new("RGB", (0, 3))):
        with pytest.raises(ValueError, match=r"^picture in memory: [^\n]+$"):
            read(Picture(image=image))


# ------------------------------------------------------------------------------ files and answers


def test_files_are_read_whole_and_within_bounds(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    picture = picture_of("a.png", tmp_path)
    assert read(picture) == read(Picture(data=PNG)) == PNG
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read(picture, Limits(max_bytes=len(PNG) - 1))
    assert str(error.value) == f"picture '{path}': more than {len(PNG) - 1} bytes"
    with pytest.raises(ValueError, match=r"^picture of \d+ bytes: more than 9 bytes$"):
        read(Picture(data=PNG), Limits(max_bytes=9))


def test_a_file_that_goes_or_changes_after_it_was_found_is_one_line(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    for change, reason in [
        (lambda: path.write_bytes(b""), "it is empty"),
        (path.unlink, "No such file or directory"),
        (path.mkdir, "it is not a file"),
    ]:
        change()
        with pytest.raises(ValueError) as error:  # noqa: PT011
            read(Picture(str(path)))
        assert str(error.value) == f"picture '{path}': {reason}"
    monkeypatch.setattr(
        "builtins.open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "No"))
    )
    path.rmdir()
    with pytest.raises(ValueError, match=r"a.png': No$"):
        read(Picture(str(path)))


class Answers(BaseHTTPRequestHandler):
    """A server of pictures, some of which are none."""

    def do_GET(self):
        if self.path == "/slow.png":
            self.server.asked.wait(5)
        codes = {"/gone.png": 404, "/moved": 302, "/to_file": 302, "/round": 302}
        self.send_response(codes.get(self.path, 200))
        targets = {"/moved": "/a b.png", "/to_file": "file:///etc/passwd", "/round": "/round"}
        if self.path in targets:
            self.send_header("Location", targets[self.path])
        if self.path == "/short.png":
            self.send_header("Content-Length", "9999")
        self.end_headers()
        self.wfile.write(b"" if self.path == "/empty.png" else PNG)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    os.environ["NO_PROXY"] = "127.0.0.1"
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answers) as server:
        server.asked = threading.Event()
        threading.Thread(target=partial(server.serve_forever, 0.01), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.asked.set()
        server.shutdown()


def test_urls_are_fetched(server):
    for name in ("/a.png", "/moved", "/a b.png?c=d#e"):
        assert read(picture_of(server + name, "", allow_urls=True)) == PNG


@pytest.mark.parametrize(
    ("name", "reason", "limits"),
    [
        ("/gone.png", "404 Not Found", Limits()),
        ("/to_file", "", Limits()),
        ("/round", "redirect", Limits()),
        ("/short.png", "", Limits()),
        ("/empty.png", "it is empty", Limits()),
        ("/a.png", "more than 9 bytes", Limits(max_bytes=9)),
        ("/slow.png", "timed out", Limits(seconds=0.1)),
        ("/a.png", "the download takes more than -1 seconds", Limits(seconds=-1.0)),
    ],
)
def test_an_answer_that_is_no_picture_is_one_line(server, name, reason, limits, monkeypatch):
    if limits.seconds < 0:  # a slow answer, without waiting for it
        import httpx

        stream = httpx.stream
        monkeypatch.setattr(httpx, "stream", lambda *a, **k: stream(*a, **{**k, "timeout": 5}))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read(Picture(url=server + name), limits)
    line = str(error.value)
    assert line.startswith(f"picture '{server}{name}': ")
    assert reason in line
    assert line.isprintable()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/a", "http://[::1", "http://", "https://a b/"])
def test_a_url_that_nobody_answers_is_one_line(url):
    with pytest.raises(ValueError, match=r"^picture 'https?://[^\n]*': [^\n]+$"):
        read(Picture(url=url), Limits(seconds=2))


# -------------------------------------------------------------------------------------- the store


def test_bytes_without_a_file_are_stored_once_by_their_digest(tmp_path):
    store = PictureStore(tmp_path / "store")
    reference = store.put(Picture(data=PNG), PNG)
    # blake2b of 16 bytes, by `b2sum --length 128`
    assert digest(b"abc") == "cf4ab791c62b8d2b2109c90275287816"
    assert reference == {"digest": digest(PNG)} == json.loads(json.dumps(reference))
    assert store.put(Picture(url="http://a/b.png"), PNG) == reference
    assert store.put(Picture(data=JPEG), JPEG) != reference
    assert store.load(reference) == PictureStore(tmp_path / "store").load(reference) == PNG
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == sorted([digest(PNG), digest(JPEG)])


def test_a_picture_with_a_file_is_not_copied(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    store = PictureStore(tmp_path / "store")
    reference = store.put(picture_of("a.png", tmp_path), PNG)
    assert reference == {"digest": digest(PNG), "path": str(tmp_path / "a.png")}
    assert store.load(reference) == PNG
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("has_file", [True, False])
def test_a_picture_that_was_changed_or_is_gone_is_named(tmp_path, has_file):
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    store = PictureStore(tmp_path / "store")
    reference = store.put(Picture(path=str(path)) if has_file else Picture(data=PNG), PNG)
    if not has_file:
        (path,) = (each for each in (tmp_path / "store").rglob("*") if each.is_file())
    path.write_bytes(PNG[:-1] + b"x")
    with pytest.raises(ValueError) as error:  # noqa: PT011
        store.load(reference)
    assert str(error.value) == (
        f"picture '{path}' has changed since it was first read; prepare data again"
    )
    path.unlink()
    with pytest.raises(ValueError) as error:  # noqa: PT011
        store.load(reference)
    assert str(error.value) == f"picture '{path}': No such file or directory"


def test_a_stored_file_that_was_cut_is_written_again(tmp_path):
    store = PictureStore(tmp_path)
    reference = store.put(Picture(data=PNG), PNG)
    (path,) = (each for each in tmp_path.rglob("*") if each.is_file())
    path.write_bytes(PNG[:9])
    assert store.put(Picture(data=PNG), PNG) == reference
    assert store.load(reference) == PNG


def test_many_may_put_the_same_bytes(tmp_path, monkeypatch):
    store, replace = PictureStore(tmp_path), os.replace
    barrier = threading.Barrier(4)

    def together(*paths):
        barrier.wait(5)
        replace(*paths)

    monkeypatch.setattr(os, "replace", together)
    with ThreadPoolExecutor(4) as pool:
        references = list(pool.map(lambda _: store.put(Picture(data=PNG), PNG), range(4)))
    assert references == [{"digest": digest(PNG)}] * 4
    assert store.load(references[0]) == PNG
    assert len([each for each in tmp_path.rglob("*") if each.is_file()]) == 1


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        PictureStore(tmp_path).put(Picture(data=PNG), PNG)
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


def test_base64_of_each_known_beginning_is_a_picture(tmp_path):
    for name in ("png", "jpeg, turned 1", "gif that moves", "webp", "tiff, float", "mpo"):
        data = GOOD[name]
        assert picture_of(base64.b64encode(data).decode(), tmp_path).data == data
