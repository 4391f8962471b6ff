//! Documents of every kind and the chunks that are made of them.

use std::fmt::Write;

use super::{WordModel, pdf};
use crate::size::TokenSizer;
use crate::{
    Chunk, Content, DocumentReader, FileKind, Input, InputOptions, ReadOptions, Splitter, Unreadable,
    each_chunk,
};

const CHUNK_TOKENS: usize = 30;

fn split(source: &str, bytes: &[u8]) -> Result<Vec<Chunk>, Unreadable> {
    let splitter = Splitter::new(TokenSizer::new(WordModel::new("1"), CHUNK_TOKENS), CHUNK_TOKENS);
    let kind = FileKind::of_path(std::path::Path::new(source)).unwrap();
    let input = Input {
        source: source.into(),
        kind,
        content: Content::Memory(bytes.to_vec()),
        options: InputOptions::default(),
    };
    let mut chunks = Vec::new();
    let mut reader = DocumentReader::new(ReadOptions::default(), || false);
    let mut keep = |chunk| {
        chunks.push(chunk);
        Ok(())
    };
    each_chunk(input, &splitter, &mut reader, &mut keep, &mut |problem| {
        panic!("{problem}")
    })?;
    Ok(chunks)
}

fn render(chunks: &[Chunk]) -> String {
    let mut out = String::new();
    for (index, chunk) in chunks.iter().enumerate() {
        let metadata = &chunk.document.metadata;
        assert_eq!(metadata["content_hash"], chunk.content_hash);
        assert!(chunk.tokens <= CHUNK_TOKENS, "{}", chunk.tokens);
        let path: Vec<&str> = metadata["section_path"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|p| p.as_str())
            .collect();
        writeln!(
            out,
            "[{index}] {} ({}, {} tokens)",
            chunk.document.id, metadata["doc_type"], chunk.tokens
        )
        .unwrap();
        writeln!(
            out,
            "    title={} position={} chapter={}",
            metadata["title"], metadata["position"], metadata["chapter_id"]
        )
        .unwrap();
        writeln!(
            out,
            "    section={} path={}",
            metadata["section_id"],
            path.join(" > ")
        )
        .unwrap();
        for line in chunk.document.text.lines() {
            writeln!(out, "    | {line}").unwrap();
        }
    }
    out
}

#[test]
fn a_nested_markdown_file() {
    let markdown = "\
---
title: Observatory handbook
---
Read this first.

# Dome

The dome opens at dusk.

## Weather

Never open above 12 m/s of wind. Moisture settles on the mirror, and what has settled there takes a whole day \
to dry. Look at the log before you open, and write into it when you close.

- wind below 12 m/s
- humidity below 85 %
- no rain within the hour

### Rain

## Motors

Run the motors once a week:

```sh
# not a heading
dome --exercise --minutes 5
```

| motor | turns |
|-------|-------|
| east  | 12    |
| west  | 14    |

# Mirror

## Weather

The same heading again, under another chapter.
";
    insta::assert_snapshot!(render(&split("docs/handbook.md", markdown.as_bytes()).unwrap()));
}

#[test]
fn a_markdown_file_with_one_title_has_its_second_level_as_chapters() {
    let markdown =
        "# Guide\n\nIntro.\n\n## Install\n\nGet it.\n\n### Linux\n\nUnpack it.\n\n## Use\n\nRun it.\n";
    insta::assert_snapshot!(render(&split("guide.md", markdown.as_bytes()).unwrap()));
}

#[test]
fn an_html_page() {
    let page = "<!doctype html><html><head><title>Care of the mirror</title><script>alert(1)</script></head><body>\
        <nav><a href='/'>Home</a></nav><h1>Mirror</h1><p>Clean it <b>rarely</b>.</p><h2>Tools</h2>\
        <ul><li>soft brush</li><li>distilled water</li></ul><pre><code>wash --slow\n</code></pre>\
        <table><tr><th>part</th><th>days</th></tr><tr><td>rim</td><td>30</td></tr></table>\
        <h2>&Uuml;bung</h2><p>Tr&auml;ge.</p></body></html>";
    insta::assert_snapshot!(render(&split("care.html", page.as_bytes()).unwrap()));
}

fn texts(source: &str, bytes: &str) -> Vec<String> {
    let chunks = split(source, bytes.as_bytes()).unwrap();
    assert!(
        chunks.iter().all(|chunk| chunk.tokens <= CHUNK_TOKENS),
        "{chunks:?}"
    );
    chunks.into_iter().map(|chunk| chunk.document.text).collect()
}

#[test]
fn rules_are_not_taken_for_front_matter() {
    let chapters = "---\n# Chapter 1\n\nMany words.\n\n---\n\n# Chapter 2\n\nShort text.";
    assert_eq!(
        texts("a.md", chapters),
        ["# Chapter 1\n\nMany words.\n\n---", "# Chapter 2\n\nShort text."]
    );
    let slides = "# Slide 1\ntext one\n\n---\n# Slide 2\ntext two\n\n---\n# Slide 3";
    assert_eq!(
        texts("a.md", slides),
        [
            "# Slide 1\ntext one\n\n---",
            "# Slide 2\ntext two\n\n---",
            "# Slide 3"
        ]
    );
    let later = "---\ntitle: T\n---\n# One\n\ntext\n\n---\ntitle: value\n---\n";
    let chunks = split("a.md", later.as_bytes()).unwrap();
    assert!(chunks.iter().all(|chunk| chunk.document.metadata["title"] == "T"));
    assert_eq!(chunks[0].document.id.as_str(), "a.md#one:0");
    let all: String = chunks.iter().map(|chunk| chunk.document.text.as_str()).collect();
    assert!(all.contains("title: value"), "{all}");
}

#[test]
fn comments_are_not_embedded() {
    let markdown = "# A\n\n<!-- not\n\nthis -->\n\ntext <!-- nor this -->\n\n# B\n\n<!-- nothing else -->\n";
    assert_eq!(texts("a.md", markdown), ["# A\n\n\n\ntext", "# B"]);
}

#[test]
fn code_of_a_page_keeps_its_backslashes_and_the_text_after_it_has_none_of_ours() {
    let line = "let s = \"a\\_b\"; // x\\*y\n";
    let page = format!(
        "<h1>T</h1><pre>{}```\n{}</pre><p>x_y_z [a](b)</p><p># not head <code>has ` tick \\_</code> p_q</p>\
         <table><tr><th>a</th></tr><tr><td>b | c <code>d|e</code></td></tr></table>",
        line.repeat(5),
        line.repeat(5)
    );
    let texts = texts("a.html", &page);
    let all = texts.join("\n");
    assert_eq!(all.matches(line.trim_end()).count(), 10, "{all}");
    assert!(all.contains("x_y_z [a](b)"), "{all}");
    assert!(all.contains("# not head ``has ` tick \\_`` p_q"), "{all}");
    assert!(all.contains("b | c `d|e`"), "{all}");
}

#[test]
fn pieces_of_code_and_tables_are_whole_in_themselves() {
    let code = "    if a {\n        b(1);\n    }\n".repeat(12);
    let texts_of_code = texts("a.md", &format!("# C\n\n```rust\n{code}```\n\nAfter it.\n"));
    let (last, code_texts) = texts_of_code.split_last().unwrap();
    assert_eq!(last, "After it.");
    assert!(
        code_texts[0].starts_with("# C\n\n```rust\n    if a {\n"),
        "{code_texts:?}"
    );
    let mut inside = String::new();
    for text in code_texts {
        let text = text.strip_prefix("# C\n\n").unwrap_or(text);
        let piece = text
            .strip_prefix("```rust\n")
            .and_then(|text| text.strip_suffix("\n```"));
        inside.push_str(piece.unwrap_or_else(|| panic!("{text}")));
        inside.push('\n');
    }
    assert_eq!(inside, code);

    let rows: Vec<String> = (0..30).map(|n| format!("| part {n} | {n} |")).collect();
    let head = "| name | n |\n|---|---|";
    let texts_of_table = texts("a.md", &format!("Before it.\n\n{head}\n{}\n", rows.join("\n")));
    assert_eq!(texts_of_table[0], "Before it.");
    let again: Vec<&str> = texts_of_table[1..]
        .iter()
        .flat_map(|text| {
            text.strip_prefix(head)
                .unwrap_or_else(|| panic!("{text}"))
                .trim()
                .lines()
        })
        .collect();
    assert_eq!(again, rows);
}

#[test]
fn marks_are_not_stored_alone() {
    // There is room for the words below the heading, and not for the rule between them.
    let words = vec!["word"; CHUNK_TOKENS - 2].join(" ");
    assert_eq!(
        texts("a.md", &format!("# H\n\n***\n\n{words}\n")),
        [format!("# H\n\n{words}")]
    );
    let heading = "word ".repeat(60);
    let texts = texts("a.md", &format!("# {heading}\n\ntext\n"));
    assert!(
        texts
            .iter()
            .all(|text| text.contains("word") || text.contains("text")),
        "{texts:?}"
    );
    let words: usize = texts.iter().map(|text| text.matches("word").count()).sum();
    assert_eq!(words, 60);
}

#[test]
fn code_keeps_the_indentation_of_its_first_line() {
    let code = format!("\n    first();\n{}", "        call(a, b);\n\n".repeat(60));
    let texts = texts("a.py", &code);
    assert!(texts[0].starts_with("    first();\n"), "{texts:?}");
    assert!(texts.len() > 3);
    assert!(
        texts[1..].iter().all(|text| text.starts_with("        call(")),
        "{texts:?}"
    );
}

#[test]
fn a_pdf_file() {
    let file = pdf(&[
        &["The dome opens at dusk.", "It closes at dawn."],
        &[],
        &["Page three."],
    ]);
    insta::assert_snapshot!(render(&split("dome.pdf", &file).unwrap()));
}

#[test]
fn a_file_without_headings() {
    let text = "The first paragraph is short.\n\nThe second one has more words than the first one had. It goes on for \
                a while, and then for another while. In the end it is longer than a chunk may be.\n\nThe third.\n";
    insta::assert_snapshot!(render(&split("notes.txt", text.as_bytes()).unwrap()));
}

#[test]
fn a_source_file() {
    let code = "use std::fmt;\n\n/// Adds.\nfn add(a: i32, b: i32) -> i32 {\n    a + b\n}\n\nfn main() {\n    println!(\"{}\", add(1, 2));\n}\n";
    insta::assert_snapshot!(render(&split("src/main.rs", code.as_bytes()).unwrap()));
}

#[test]
fn rows_of_jsonl_and_csv() {
    let long = "word ".repeat(40);
    let jsonl = format!(
        "{{\"id\":\"a\",\"text\":\"short\",\"metadata\":{{\"lang\":\"en\"}}}}\n{{\"id\":\"b\",\"text\":\"{long}\"}}\n\
         {{\"text\":\"same\"}}\n{{\"text\":\"same\"}}\n"
    );
    let ids = |chunks: &[Chunk]| {
        chunks
            .iter()
            .map(|c| c.document.id.to_string())
            .collect::<Vec<_>>()
    };
    let chunks = split("x.jsonl", jsonl.as_bytes()).unwrap();
    let key = &crate::chunk::content_hash("same")[..16];
    assert_eq!(
        ids(&chunks),
        [
            "x.jsonl#a:0",
            "x.jsonl#b:0",
            "x.jsonl#b:1",
            &format!("x.jsonl#{key}:0"),
            &format!("x.jsonl#{key}-2:0")
        ]
    );
    assert_eq!(chunks[0].document.metadata["lang"], "en");
    assert_eq!(chunks[2].document.metadata["section_id"], "x.jsonl#b");
    let chunks = split("x.csv", b"id,text\n1,one\n2,two\n").unwrap();
    assert_eq!(ids(&chunks), ["x.csv#1:0", "x.csv#2:0"]);
}

#[test]
fn files_of_rows_may_be_larger_than_files_that_are_read_as_a_whole() {
    let rows: String = (0..100)
        .map(|n| format!("{{\"id\":{n},\"text\":\"row {n}\"}}\n"))
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    std::fs::write(&path, &rows).unwrap();
    let options = ReadOptions {
        max_bytes: 100,
        ..ReadOptions::default()
    };
    let splitter = Splitter::new(TokenSizer::new(WordModel::new("1"), CHUNK_TOKENS), CHUNK_TOKENS);
    let input = Input {
        source: "rows.jsonl".into(),
        kind: FileKind::JsonLines,
        content: Content::File(path),
        options: InputOptions::default(),
    };
    let mut count = 0;
    let mut visit = |_| {
        count += 1;
        Ok(())
    };
    let mut reader = DocumentReader::new(options, || false);
    each_chunk(input, &splitter, &mut reader, &mut visit, &mut |bad| {
        panic!("{bad}")
    })
    .unwrap();
    assert_eq!(count, 100);
}

#[test]
fn images_within_documents_make_no_chunks() {
    let pixels = "iVBORw0KGgo/".repeat(4_000);
    let uri = format!("data:image/png;base64,{pixels}");
    let markdown = format!("# Dome\n\nBefore ![the dome]({uri}) after.\n\n![dome][1]\n\n[1]: {uri}\n");
    let all = texts("a.md", &markdown);
    assert!(all.len() <= 2 && !all.concat().contains("iVBOR"), "{all:?}");
    assert!(all[0].contains("the dome"), "{all:?}");
    let html =
        format!("<h1>Dome</h1><p>Before <img alt='the dome' src='{uri}'> <a href='{uri}'>link</a> after.");
    let all = texts("a.html", &html);
    assert_eq!(all.len(), 1, "{all:?}");
    assert!(
        all[0].contains("the dome") && !all[0].contains("iVBOR"),
        "{all:?}"
    );
}

#[test]
fn preformatted_text_with_markup_does_not_join_sections() {
    let section = |n: u32| {
        format!(
            "<h2>Step {n}</h2><pre class='screen'><code class='prompt'># </code>\
             <strong class='userinput'><code>apt install part{n}</code></strong>\nReading lists...</pre>"
        )
    };
    let html: String = (1..=3).map(section).collect();
    let chunks = split("a.html", html.as_bytes()).unwrap();
    let ids: Vec<&str> = chunks.iter().map(|chunk| chunk.document.id.as_str()).collect();
    assert_eq!(ids, ["a.html#step-1:0", "a.html#step-2:0", "a.html#step-3:0"]);
    assert_eq!(
        chunks[1].document.text,
        "## Step 2\n\n```\n# apt install part2\nReading lists...\n```"
    );
}

#[test]
fn one_line_of_five_megabytes() {
    let words = "lorem ipsum dolor sit amet ".repeat(5_000_000 / 27);
    let chunks = split("line.txt", words.as_bytes()).unwrap();
    assert!(chunks.iter().all(|chunk| chunk.tokens <= CHUNK_TOKENS));
    let again: String = chunks
        .iter()
        .map(|chunk| format!("{} ", chunk.document.text))
        .collect();
    assert_eq!(again, words);
    // Without a space, where a tokeniser may see one unknown word.
    let solid = "x".repeat(5_000_000);
    let chunks = split("solid.txt", solid.as_bytes()).unwrap();
    assert!(
        chunks
            .iter()
            .all(|chunk| chunk.document.text.len() <= CHUNK_TOKENS * 16)
    );
    assert_eq!(
        chunks
            .iter()
            .map(|chunk| chunk.document.text.len())
            .sum::<usize>(),
        solid.len()
    );
}

#[test]
fn invalid_utf_8() {
    insta::assert_snapshot!(render(&split("latin.txt", b"caf\xe9 au lait\n").unwrap()));
    insta::assert_snapshot!(render(
        &split("broken.md", b"# \xc3\x9cber\n\nna\xc3\xafve \xff byte\n").unwrap()
    ));
}

#[test]
fn an_empty_file() {
    for name in ["a.md", "a.txt", "a.html", "a.rs", "a.jsonl", "a.csv"] {
        assert_eq!(split(name, b"").unwrap(), [], "{name}");
        assert_eq!(split(name, b" \n\n").unwrap(), [], "{name}");
    }
    assert!(split("a.pdf", b"").is_err());
}

#[test]
fn what_is_no_document_is_refused() {
    let problem = |name: &str, bytes: &[u8]| split(name, bytes).unwrap_err().to_string();
    assert_eq!(problem("a.txt", b"\x7fELF\0\0"), "it is a binary file, not text");
    assert_eq!(problem("a.pdf", b"hello"), "it does not begin like a PDF file");
    assert!(problem("a.pdf", b"%PDF-1.4 and then nothing").starts_with("this PDF cannot be read"));
    let pages = pdf(&[&[]]);
    assert_eq!(
        problem("scan.pdf", &pages),
        "it has no text; its pages may be scanned images"
    );
}

#[test]
fn ids_of_long_names_are_cut_and_stay_apart() {
    let (a, b) = (
        format!("{}a.md", "ä".repeat(400)),
        format!("{}b.md", "ä".repeat(400)),
    );
    let id = |name: &str| split(name, b"text").unwrap()[0].document.id.clone();
    assert!(id(&a).as_str().len() <= 512);
    assert_ne!(id(&a), id(&b));
}
