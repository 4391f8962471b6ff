//! Files that are made to take a machine down.

use std::io::Write;

use serde_json::json;

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
    assert_eq!(error, "it has no text; its pages may be scanned images");
}

#[test]
fn html_that_is_nested_or_multiplies_is_refused_by_a_limit() {
    let error = error_of("deep.html", "<div>".repeat(500_000).as_bytes());
    assert!(error.contains("nested more than 512 deep"), "{error}");
    // Every paragraph takes over all the fonts that were left open in the one before.
    let fonts: String = (0..400).map(|n| format!("<font size={n}>")).collect();
    let error = error_of(
        "many.html",
        format!("<p>{fonts}{}", "<p>x".repeat(400_000)).as_bytes(),
    );
    assert!(
        error.contains("more memory") || error.contains("longer than"),
        "{error}"
    );
}

#[tokio::test]
async fn a_page_that_only_looks_shallow_fails_alone_and_the_server_stays() {
    let desk = Desk::new();
    let server = desk.server().start().await;
    let create = json!({"name": "c", "embedding_model": "small"});
    server.post("/collections", create).await.ok();
    // Closing tags that match nothing close nothing.
    let bomb = format!("<pre>{}", "<object></q>".repeat(600_000));
    let body = json!({"documents": [{"name": "bomb.html", "content": bomb}, {"name": "good.md", "content": "fine"}]});
    let job = server.post("/collections/c/ingest", body).await.json();
    let job = super::jobs::finished(&server, &job["id"]).await;
    assert_eq!(job["documents"]["added"], 1, "{job}");
    let error = job["errors"][0]["error"].as_str().unwrap();
    assert!(error.contains("nested more than 512 deep"), "{error}");
    server.get("/health").await.ok();
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_cancelled_job_ends_its_reader() {
    let desk = Desk::new();
    let server = desk.server().start().await;
    let create = json!({"name": "c", "embedding_model": "small"});
    server.post("/collections", create).await.ok();
    let fonts: String = (0..400).map(|n| format!("<font size={n}>")).collect();
    let slow = format!("<p>{fonts}{}", "<p>x".repeat(400_000));
    let body = json!({"documents": [{"name": "slow.html", "content": slow}]});
    let job = server.post("/collections/c/ingest", body).await.json();
    let wait = async |is_there: bool| {
        for _ in 0..1000 {
            if readers(server.pid()) == usize::from(is_there) {
                return true;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        false
    };
    assert!(wait(true).await, "no reader was started");
    let cancelled = server
        .delete(&format!("/jobs/{}", job["id"].as_str().unwrap()))
        .await
        .ok();
    assert_eq!(cancelled["state"], "cancelled");
    assert!(wait(false).await, "the reader is still there");
}

/// Number of processes that were started by a process and have not ended.
#[cfg(target_os = "linux")]
fn readers(parent: u32) -> usize {
    let parent = format!(" {parent} ");
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let stats = entries.filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok());
    stats
        .filter(|stat| {
            let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
            // State, then parent.
            fields.get(2..).is_some_and(|rest| rest.starts_with(&parent)) && !fields.starts_with(" Z")
        })
        .count()
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
