"""One server of the demo model for all clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.clients import TOOLS_TEMPLATE
from support.serving import RunningServer, running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TOOLS_TEMPLATE)
    with running_server(None, "--chat-template-file", str(template)) as server:
        yield server
