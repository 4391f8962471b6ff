//! Identity of files: documents of other origins are neither replaced nor removed.

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

#[tokio::test]
async fn a_file_is_one_document_whichever_path_leads_to_it() {
    let desk = Desk::new();
    desk.write("place/inc/a.md", "# A\n\nText.\n");
    let absolute = desk.path("place/inc/a.md").display().to_string();
    assert_eq!(
        counts(&report(&desk.inside("place", &["inc/a.md"]))),
        [1, 0, 0, 0, 0]
    );
    for (folder, path) in [
        ("place/inc", "a.md"),
        ("place/inc", absolute.as_str()),
        ("place/inc", "."),
        ("place/inc", "*.md"),
        ("place/inc", ".."),
    ] {
        let again = report(&desk.inside(folder, &[path]));
        assert_eq!(counts(&again), [0, 0, 1, 0, 0], "{path}: {again}");
    }
    let server = desk.server().start().await;
    let url = server.url("");
    let sent = report(&desk.command(&["place/inc", "--url", &url]).run());
    assert_eq!(counts(&sent), [0, 0, 1, 0, 0], "{sent}");
    let listed = server.get("/collections/c/documents").await.ok();
    assert_eq!(crate::support::ids(&listed["documents"]), ["a.md#a:0"]);
}

#[tokio::test]
async fn prune_through_a_server_touches_only_files_of_the_same_folder() {
    let desk = Desk::new();
    desk.write("one/a.md", "# A\n\nStays.\n");
    desk.write("one/b.md", "# B\n\nGoes.\n");
    desk.write("two/b.md", "# B\n\nOf the second folder.\n");
    desk.write("rows", "{\"id\":\"1\",\"text\":\"a row\"}\n");
    let server = desk.server().start().await;
    let url = server.url("");
    let send = |folder: &str, args: &[&str]| report(&desk.inside(folder, &[args, &["--url", &url]].concat()));
    assert_eq!(counts(&send("one", &["."])), [2, 0, 0, 0, 0]);
    assert_eq!(counts(&send("two", &[".", "--as", "second"])), [1, 0, 0, 0, 0]);
    let rows = std::fs::File::open(desk.path("rows")).unwrap();
    let mut command = desk.command(&["-", "--url", &url]).build();
    assert!(command.stdin(rows).output().unwrap().status.success());
    let body = json!({"documents": [{"name": "sent.md", "content": "over HTTP"}]});
    let job = server.post("/collections/c/ingest", body).await.json();
    assert_eq!(super::jobs::finished(&server, &job["id"]).await["state"], "done");
    assert_eq!(total(&server).await, 5);

    desk.remove("one/b.md");
    desk.remove("two/b.md");
    assert_eq!(counts(&send("one", &[".", "--prune"])), [0, 0, 1, 1, 0]);
    let listed = server.get("/collections/c/sources").await.ok();
    let sources: Vec<&str> = listed["sources"]
        .as_array()
        .unwrap()
        .iter()
        .map(|source| source["source"].as_str().unwrap())
        .collect();
    assert_eq!(sources, ["a.md", "second/b.md", "sent.md"]);
    assert_eq!(total(&server).await, 4);
    assert_eq!(
        counts(&send("two", &[".", "--prune", "--as", "second"])),
        [0, 0, 0, 1, 0]
    );
    let page = server.get("/collections/c/sources?limit=1").await.ok();
    assert_eq!(
        (&page["sources"][0]["source"], &page["next"]),
        (&json!("a.md"), &json!("a.md"))
    );
    let rest = server.get("/collections/c/sources?limit=1&after=a.md").await.ok();
    assert_eq!(
        (&rest["sources"][0]["source"], &rest["next"]),
        (&json!("sent.md"), &Value::Null)
    );
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
