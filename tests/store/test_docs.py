"""The page about the store says what is true."""

from __future__ import annotations

import re
from pathlib import Path

from gradvitals.store import RunWriter, schema

PAGE = (Path(__file__).parents[2] / "docs" / "store.md").read_text()


def test_the_recipe_without_gradvitals_reads_a_run(tmp_path, monkeypatch, make_layout, make_reading):
    monkeypatch.chdir(tmp_path)
    with RunWriter("runs/gpt", meta={}) as writer:
        writer.write(make_layout("other", "blocks.0.attn.qkv.weight", "more"))
        for step in range(340):
            writer.write(make_reading(step))
            writer.commit()
        writer._db.execute("BEGIN")
        assert writer._db.execute("SELECT count(*) FROM chunk").fetchone()[0]
        assert writer._db.execute("SELECT count(*) FROM tail").fetchone()[0]
        writer._db.execute("COMMIT")
        recipe = PAGE.split("## Reading without gradvitals")[1].split("```python")[1].split("```")[0]
        found: dict = {}
        exec(recipe, found)
        found["db"].close()
    assert found["points"] == {step: step + 0.25 for step in range(340)}


def test_the_page_names_every_table_and_the_version():
    assert all(f"`{table}`" in PAGE for table in re.findall(r"CREATE TABLE (\w+)", schema.DDL))
    assert f"{schema.APPLICATION_ID:#x}".upper()[2:] in PAGE
    assert f"format, now {schema.SCHEMA_VERSION}." in PAGE
