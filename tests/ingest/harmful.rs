//! Files that are made to take a machine down.

use std::io::Write;

use super::{Desk, counts, report};

fn error_of(source: &str, bytes: &[u8]) -> String {
    let desk = Desk::new();
    desk.write(source, bytes);
    desk.write("good.md", "fine");
    let finished = desk.here(&[source, "good.md"]);
    let report = report(&finished);
    assert_eq!(counts(&report), [1, 0, 0, 0, 1], "{report}");
    report["errors"][0]["error"].as_str().unwrap().to_owned()
}

/// One page with this content, which is packed as the filters say.
fn pdf_with_page(content: &[u8], filters: &str) -> Vec<u8> {
    let mut file = b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog /Pages 2 0 R >>\nendobj\n\
        2 0 obj\n<< /Type /Pages /Kids [3 0 R] /Count 1 >>\nendobj\n\
        3 0 obj\n<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << >> >>\nendobj\n"
        .to_vec();
    let offset = file.len();
    write!(
        file,
        "4 0 obj\n<< /Length {} /Filter {filters} >>\nstream\n",
        content.len()
    )
    .unwrap();
    file.extend(content);
    file.extend(b"\nendstream\nendobj\n");
    let table = file.len();
    write!(file, "xref\n0 5\n0000000000 65535 f \n0000000009 00000 n \n0000000058 00000 n \n0000000115 00000 n \n{offset:010} 00000 n \n")
        .unwrap();
    write!(
        file,
        "trailer\n<< /Size 5 /Root 1 0 R >>\nstartxref\n{table}\n%%EOF\n"
    )
    .unwrap();
    file
}

fn deflate(bytes: impl IntoIterator<Item = Vec<u8>>) -> Vec<u8> {
    let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    for part in bytes {
        encoder.write_all(&part).unwrap();
    }
    encoder.finish().unwrap()
}

#[test]
fn a_pdf_that_unpacks_to_gigabytes_is_refused_by_a_limit() {
    // A page of nothing, and a page of operations, each far larger than what it is packed into.
    let blank = std::iter::repeat_n(vec![b' '; 1 << 20], 3000);
    let operations = std::iter::repeat_n(b"q Q ".repeat(1 << 18), 400);
    for content in [deflate(blank), deflate(operations)] {
        let bomb = pdf_with_page(&content, "/FlateDecode");
        assert!(bomb.len() < 32 << 20);
        let error = error_of("bomb.pdf", &bomb);
        assert!(
            error.contains("more memory") || error.contains("longer than"),
            "{error}"
        );
    }
}

#[test]
fn a_pdf_page_tree_without_end_is_refused() {
    let file = String::from_utf8(pdf_with_page(b"", "/FlateDecode")).unwrap();
    let looped = file.replace("/Kids [3 0 R]", "/Kids [2 0 R]");
    let error = error_of("loop.pdf", looped.as_bytes());
    assert!(!error.is_empty());
}

#[test]
fn html_that_is_nested_or_multiplies_is_refused_by_a_limit() {
    let error = error_of("deep.html", "<div>".repeat(500_000).as_bytes());
    assert!(error.contains("nested 500000 deep"), "{error}");
    // Every paragraph takes over all the fonts that were left open in the one before.
    let fonts: String = (0..1_500).map(|n| format!("<font size={n}>")).collect();
    let error = error_of(
        "many.html",
        format!("<p>{fonts}{}", "<p>x".repeat(200_000)).as_bytes(),
    );
    assert!(
        error.contains("more memory") || error.contains("longer than"),
        "{error}"
    );
}

#[test]
fn a_large_page_of_many_elements_is_read() {
    let desk = Desk::new();
    let rows: String = (0..30_000)
        .map(|n| format!("<div><div><p>Row <b>{n}</b></p></div></div>"))
        .collect();
    desk.write("large.html", format!("<html><body>{}{rows}", "<div>".repeat(100)));
    let finished = desk.here(&["large.html", "--dry-run"]);
    assert!(finished.stdout.contains("29999"), "{:?}", finished.stderr);
}
