"""The web page at `/`, whose files are in the package. Its security policy allows requests to this server only."""

import functools
from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response

from multilin.serving.errors import NOT_FOUND, ApiError

router = APIRouter()
OWN, SHARED = ("multilin.serving", "assets"), ("multilin.export", "assets/web")
FILES = dict.fromkeys(("page.css", "page.js", "reading.js", "server.js", "texts.js", "tree.js"), OWN)
FILES["base.css"] = SHARED  # an export's page uses it too
PATHS = ("/", *(f"/assets/{name}" for name in FILES))
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@router.get("/")
async def page() -> Response:
    """Send the page."""
    return _file(OWN, "index.html")


@router.get("/assets/{name}")
async def asset(name: str) -> Response:
    """Send a file of the page."""
    if name not in FILES:
        raise ApiError(404, f"the page has no file {name!r:.60}", None, NOT_FOUND)
    return _file(FILES[name], name)


@functools.cache
def _file(place: tuple[str, str], name: str) -> Response:
    package, folder = place
    content = (resources.files(package) / folder / name).read_bytes()
    return Response(content, media_type=TYPES[name.rpartition(".")[2]], headers=HEADERS)
