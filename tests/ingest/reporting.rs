//! Reports of `ragstone ingest` about files that it did not store.

use super::{Desk, counts, report};

#[cfg(unix)]
#[tokio::test]
async fn what_is_no_regular_file_is_refused_and_makes_no_collection() {
    let desk = Desk::new();
    let refused = desk.here(&["/dev/null"]);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert_eq!(counts(&report(&refused)), [0, 0, 0, 0, 1]);
    assert!(
        refused.stderr.contains("/dev/null: it is not a regular file"),
        "{refused:?}"
    );
    let server = desk.server().start().await;
    server.get("/collections/c").await.refused(404);
}

#[tokio::test]
async fn a_pattern_that_matches_nothing_fails_unless_it_prunes() {
    let desk = Desk::new();
    desk.write("docs/a.md", "# Dome\n\nOpens at dusk.\n");
    let none = desk.here(&["docs/*.txt"]);
    assert_eq!(none.code, Some(1), "{none:?}");
    assert!(none.stderr.contains("docs/*.txt: no file matches"), "{none:?}");
    let mut server = desk.server().start().await;
    server.get("/collections/c").await.refused(404);
    server.terminate();
    server.wait_for_exit();

    assert_eq!(desk.here(&["docs/*.md"]).code, Some(0));
    desk.remove("docs/a.md");
    let pruned = desk.here(&["docs/*.md", "--prune"]);
    assert_eq!(pruned.code, Some(0), "{pruned:?}");
    assert_eq!(counts(&report(&pruned)), [0, 0, 0, 1, 0]);
}

#[tokio::test]
async fn types_that_were_skipped_are_named() {
    let desk = Desk::new();
    desk.write("docs/a.md", "text");
    desk.write("docs/b.docx", "x");
    desk.write("docs/c.PPTX", "x");
    let plain = desk.plainly(&["docs"]);
    let first = plain.succeeded().lines().next().unwrap_or_default();
    assert_eq!(
        first,
        "c: 1 added, 0 changed, 0 unchanged, 0 removed, 0 failed, 2 skipped (unsupported types: .docx, .pptx)"
    );
}

#[tokio::test]
async fn failures_are_counted_as_they_are() {
    let desk = Desk::new();
    desk.write("bad.txt", [0u8; 8]);
    let alone = desk.plainly(&["bad.txt"]);
    let said = alone.failed_with(1);
    assert!(
        said.trim_end().ends_with("1 document could not be ingested"),
        "{said}"
    );
    desk.write("good.txt", "text");
    let beside = desk.plainly(&["bad.txt", "good.txt"]);
    let said = beside.failed_with(1);
    assert!(
        said.trim_end()
            .ends_with("1 document could not be ingested; the others are"),
        "{said}"
    );
    let nobody = desk.plainly(&["good.txt", "--url", "http://127.0.0.1:1"]);
    let said = nobody.failed_with(1);
    assert!(said.contains("no server answers at http://127.0.0.1:1"), "{said}");
}

#[tokio::test]
async fn what_a_parser_thinks_of_a_page_is_not_logged() {
    let desk = Desk::new();
    let page = "<table><tr><td>cell</td></tr>text in a table<b>bold</table>";
    desk.write("page.html", page);
    let read = desk.plainly(&["page.html"]);
    assert!(read.succeeded().contains("1 added"), "{read:?}");
    assert!(!read.stderr.contains("foster"), "{read:?}");
}
