//! What came from elsewhere is neither replaced nor removed, and names tell files apart.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde_json::{Value, json};

use super::{Desk, counts, report};
use crate::support::Finished;

impl Desk {
    /// `ragstone ingest …` from another folder, as [`Desk::here`] unless a server is named.
    fn inside(&self, folder: &str, args: &[&str]) -> Finished {
        let mut command = self.command(args);
        if !args.contains(&"--url") {
            command = command.arg("--data-dir").arg(self.setup.data_dir());
            command = command.arg("--embeddings-config").arg(&self.embeddings);
        }
        let mut command = command.build();
        let output = command.current_dir(self.path(folder)).output().unwrap();
        Finished::from(output)
    }
}

async fn total(server: &crate::support::Server) -> Value {
    server.get("/collections/c/documents").await.ok()["total"].clone()
}

#[tokio::test]
async fn two_folders_with_files_of_the_same_name_share_a_collection() {
    let desk = Desk::new();
    desk.write("one/README.md", "# One\n\nAbout domes.\n");
    desk.write("one/only.md", "# Only\n\nHere alone.\n");
    desk.write("two/README.md", "# Two\n\nAbout mirrors.\n");
    assert_eq!(counts(&report(&desk.inside("one", &["."]))), [2, 0, 0, 0, 0]);
    let other = desk.inside("two", &[".", "--prune"]);
    let answer = report(&other);
    assert_eq!(counts(&answer), [0, 0, 0, 0, 1], "{other:?}");
    let problem = answer["errors"][0]["error"].as_str().unwrap();
    assert!(
        problem.contains("--as") && problem.contains("one/README.md"),
        "{problem}"
    );
    let named = report(&desk.inside("two", &[".", "--prune", "--as", "two"]));
    assert_eq!(counts(&named), [1, 0, 0, 0, 0]);
    // A folder that was moved takes its documents along.
    std::fs::rename(desk.path("one"), desk.path("moved")).unwrap();
    assert_eq!(counts(&report(&desk.inside("moved", &["."]))), [0, 0, 2, 0, 0]);
    let server = desk.server().start().await;
    assert_eq!(total(&server).await, 3);
}

#[tokio::test]
async fn prune_spares_rows_of_standard_input_and_folders_that_are_away() {
    let desk = Desk::new();
    desk.write("rows", "{\"id\":\"1\",\"text\":\"a row\"}\n");
    desk.write("place/docs/a.md", "# A\n\nStays.\n");
    desk.write("place/docs/b.md", "# B\n\nGoes.\n");
    let command = desk.command(&["-"]).arg("--data-dir").arg(desk.setup.data_dir());
    let mut command = command.arg("--embeddings-config").arg(&desk.embeddings).build();
    let rows = std::fs::File::open(desk.path("rows")).unwrap();
    assert!(command.stdin(rows).output().unwrap().status.success());
    desk.remove("rows");
    assert_eq!(counts(&report(&desk.inside("place", &["docs"]))), [2, 0, 0, 0, 0]);
    std::fs::rename(desk.path("place/docs"), desk.path("away")).unwrap();
    let away = report(&desk.inside("place", &["docs", "--prune"]));
    assert_eq!(
        (&away["removed"], &away["failed"]),
        (&json!(0), &json!(1)),
        "{away}"
    );
    std::fs::rename(desk.path("away"), desk.path("place/docs")).unwrap();
    desk.remove("place/docs/b.md");
    assert_eq!(
        counts(&report(&desk.inside("place", &[".", "--prune"]))),
        [0, 0, 1, 1, 0]
    );
    let server = desk.server().start().await;
    assert_eq!(total(&server).await, 2);
}

#[tokio::test]
async fn prune_through_a_server_spares_documents_of_other_makers() {
    let desk = Desk::new();
    desk.write("place/docs/a.md", "# A\n\nText.\n");
    desk.write("place/docs/b.md", "# B\n\nText.\n");
    let server = desk.server().start().await;
    let url = server.url("");
    let sent = |args: &[&str]| counts(&report(&desk.inside("place", &[args, &["--url", &url]].concat())));
    assert_eq!(sent(&["docs"]), [2, 0, 0, 0, 0]);
    let by_hand = ["https://example.com/page", "docs/gone.md"]
        .map(|source| json!({"id": source, "text": "by hand", "metadata": {"source": source}}));
    server
        .post("/collections/c/documents", json!({"documents": by_hand}))
        .await
        .ok();
    desk.remove("place/docs/b.md");
    assert_eq!(sent(&[".", "--prune"]), [0, 0, 1, 1, 0]);
    assert_eq!(total(&server).await, 3);
}

/// Lines of 20 KB, more than one request may have.
fn many_rows(count: usize, id: impl Fn(usize) -> Option<String>) -> String {
    let pad = "p".repeat(20_000);
    (0..count)
        .map(|n| match id(n) {
            Some(id) => format!("{}\n", json!({"id": id, "text": "same text", "pad": pad})),
            None => format!("{}\n", json!({"text": "same text", "pad": pad})),
        })
        .collect()
}

#[tokio::test]
async fn rows_of_a_file_that_is_sent_in_parts_are_those_of_one_file() {
    let desk = Desk::new();
    let server = desk.server().start().await;
    let url = server.url("");
    let send = |name: &str| report(&desk.command(&[name, "--url", &url]).run());
    desk.write("equal.jsonl", many_rows(900, |_| None));
    assert_eq!(counts(&send("equal.jsonl")), [900, 0, 0, 0, 0]);
    assert_eq!(total(&server).await, 900);
    desk.write("named.jsonl", many_rows(900, |n| Some(n.to_string())));
    assert_eq!(counts(&send("named.jsonl")), [900, 0, 0, 0, 0]);
    desk.write("named.jsonl", many_rows(850, |n| Some(n.to_string())));
    let shorter = send("named.jsonl");
    assert_eq!(
        (&shorter["unchanged"], &shorter["removed"]),
        (&json!(850), &json!(50)),
        "{shorter}"
    );
    assert_eq!(total(&server).await, 1750);
}

#[tokio::test]
async fn names_that_are_no_unicode_are_told_apart() {
    let desk = Desk::new();
    for name in [&b"caf\xe9.md"[..], b"caf\xe8.md"] {
        let path = desk.path("docs").join(Path::new(OsStr::from_bytes(name)));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, format!("# Coffee\n\n{name:?}\n")).unwrap();
    }
    assert_eq!(counts(&report(&desk.here(&["docs", "--prune"]))), [2, 0, 0, 0, 0]);
    assert_eq!(counts(&report(&desk.here(&["docs", "--prune"]))), [0, 0, 2, 0, 0]);
}

#[tokio::test]
async fn a_name_that_cannot_be_one_fails_alone() {
    let desk = Desk::new();
    desk.write("docs/good.md", "# Good\n\nText.\n");
    desk.write("docs/tab\tname.md", "# Odd\n\nText.\n");
    let server = desk.server().start().await;
    let sent = desk.command(&["docs", "--url", &server.url("")]).run();
    let answer = report(&sent);
    assert_eq!(counts(&answer), [1, 0, 0, 0, 1], "{sent:?}");
    assert!(
        answer["errors"][0]["source"]
            .as_str()
            .unwrap()
            .contains("name.md"),
        "{answer}"
    );
}

#[tokio::test]
async fn a_deleted_collection_leaves_its_name_to_another_folder() {
    let desk = Desk::new();
    desk.write("one/README.md", "# One\n\nAbout domes.\n");
    desk.write("two/README.md", "# Two\n\nAbout mirrors.\n");
    assert_eq!(counts(&report(&desk.inside("one", &["."]))), [1, 0, 0, 0, 0]);
    let server = desk.server().start().await;
    server.delete("/collections/c").await.ok();
    drop(server.stop());
    assert_eq!(counts(&report(&desk.inside("two", &["."]))), [1, 0, 0, 0, 0]);
}
