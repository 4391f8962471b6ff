use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde_json::json;

use super::{document, fill, ragstone, text};
use crate::support::Setup;

const WRITERS: usize = 4;

/// Each writer adds documents to its own collection in order, so that every consistent state has a prefix
/// of each.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_backup_under_write_load_is_one_state_and_has_all_that_was_acknowledged_before_it() {
    let server = Arc::new(Setup::without_models().start().await);
    fill(&server, "settled", 3000).await;
    let stop = Arc::new(AtomicBool::new(false));
    let acknowledged: Arc<Vec<AtomicUsize>> = Arc::new((0..WRITERS).map(|_| AtomicUsize::new(0)).collect());
    let mut writers = Vec::new();
    for n in 0..WRITERS {
        server.create(&format!("writer{n}")).await;
        let (server, stop, acknowledged) = (server.clone(), stop.clone(), acknowledged.clone());
        writers.push(tokio::spawn(async move {
            let mut count = 0;
            while !stop.load(Ordering::SeqCst) {
                server.add(&format!("writer{n}"), vec![document(count)]).await;
                count += 1;
                acknowledged[n].store(count, Ordering::SeqCst);
            }
        }));
    }
    let counts = || {
        acknowledged
            .iter()
            .map(|count| count.load(Ordering::SeqCst))
            .collect::<Vec<_>>()
    };
    let folder = tempfile::tempdir().unwrap();
    let data = server.setup().data_dir();
    let mut backups = Vec::new();
    for n in 0..3 {
        let wanted = counts()[0] + 20;
        while counts()[0] < wanted {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
        let file = folder.path().join(format!("backup{n}"));
        let before = counts();
        let done = ragstone(&["backup", text(&file), "--data-dir", text(&data)]).await;
        assert!(done.succeeded().contains("collections"), "{done:?}");
        backups.push((file, before, counts()));
    }
    stop.store(true, Ordering::SeqCst);
    for writer in writers {
        writer.await.unwrap();
    }
    for (file, before, after) in backups {
        assert!(!file.with_extension("part").exists());
        let restored = Setup::without_models();
        let into = restored.data_dir();
        ragstone(&["restore", text(&file), "--data-dir", text(&into)])
            .await
            .succeeded();
        let restored = restored.start().await;
        assert_eq!(restored.get("/collections/settled").await.ok()["count"], 3000);
        for n in 0..WRITERS {
            let path = format!("/collections/writer{n}/documents?limit=1000");
            let found = restored.get(&path).await.ok();
            let count = found["total"].as_u64().unwrap() as usize;
            assert!(
                count >= before[n],
                "writer {n}: {count} of {before:?} acknowledged"
            );
            // One unacknowledged write may be included.
            assert!(count <= after[n] + 1, "writer {n}: {count}, {after:?} afterwards");
            let places: Vec<u64> = found["documents"]
                .as_array()
                .unwrap()
                .iter()
                .map(|document| document["metadata"]["n"].as_u64().unwrap())
                .collect();
            let expected: Vec<u64> = (0..count.min(1000) as u64).collect();
            assert_eq!(places, expected, "writer {n}");
            if count > 0 {
                let query = json!({"query_embedding": document(count - 1)["embedding"], "top_k": 1});
                let hit = restored
                    .post(&format!("/collections/writer{n}/query"), query)
                    .await
                    .ok();
                assert_eq!(hit["results"].as_array().unwrap().len(), 1);
            }
        }
        restored.add("settled", vec![document(9999)]).await;
    }
}

#[tokio::test]
async fn a_restore_replaces_nothing_unasked_and_nothing_in_use() {
    let server = Setup::without_models().start().await;
    fill(&server, "docs", 10).await;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let data = server.setup().data_dir();
    ragstone(&["backup", text(&at("backup")), "--data-dir", text(&data)])
        .await
        .succeeded();
    server.add("docs", vec![document(10)]).await;
    let backup = at("backup");
    let force = ["restore", text(&backup), "--force", "--data-dir", text(&data)];
    let used = ragstone(&force).await;
    assert!(used.failed_with(1).contains("in use by another"), "{used:?}");
    assert_eq!(server.get("/collections/docs").await.ok()["count"], 11);

    let setup = server.kill();
    let plain = ragstone(&["restore", text(&at("backup")), "--data-dir", text(&data)]).await;
    assert!(plain.failed_with(1).contains("--force"), "{plain:?}");
    let server = setup.start().await;
    assert_eq!(server.get("/collections/docs").await.ok()["count"], 11);
    let setup = server.kill();
    // A write-ahead log left by a kill must not be applied to the restored database.
    assert!(
        ragstone(&force)
            .await
            .succeeded()
            .contains("1 collections, 10 documents")
    );
    let server = setup.start().await;
    assert_eq!(server.get("/collections/docs").await.ok()["count"], 10);
}

#[tokio::test]
async fn what_is_no_backup_is_refused_and_changes_nothing() {
    let server = Setup::without_models().start().await;
    fill(&server, "docs", 200).await;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let data = server.setup().data_dir();
    ragstone(&["backup", text(&at("backup")), "--data-dir", text(&data)])
        .await
        .succeeded();
    let good = std::fs::read(at("backup")).unwrap();
    std::fs::write(at("text"), "not a database").unwrap();
    std::fs::write(at("short"), &good[..good.len() / 2]).unwrap();
    let mut torn = good.clone();
    let middle = torn.len() / 2;
    torn[middle..middle + 20_000].fill(0x5a);
    std::fs::write(at("torn"), torn).unwrap();
    let into = at("data");
    for bad in ["text", "short", "torn", "missing"] {
        let refused = ragstone(&["restore", text(&at(bad)), "--data-dir", text(&into)]).await;
        let said = refused.failed_with(1);
        assert!(
            said.contains("is not a backup that can be restored"),
            "{bad}: {said}"
        );
        assert!(!into.join("ragstone.db").exists() && !into.join("ragstone.db.restoring").exists());
    }
    let nothing = ragstone(&["backup", text(&at("no")), "--data-dir", text(&at("nowhere"))]).await;
    assert!(nothing.failed_with(1).contains("no database"), "{nothing:?}");
    assert!(!at("no").exists() && !at("nowhere").exists());
    ragstone(&["restore", text(&at("backup")), "--data-dir", text(&into)])
        .await
        .succeeded();
}

/// A restore that is killed leaves a partial file next to the lock.
#[tokio::test]
async fn a_restore_that_was_interrupted_can_be_repeated() {
    let server = Setup::without_models().start().await;
    fill(&server, "docs", 50).await;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let data = server.setup().data_dir();
    ragstone(&["backup", text(&at("backup")), "--data-dir", text(&data)])
        .await
        .succeeded();
    let half = std::fs::read(at("backup")).unwrap();
    let into = at("data");
    std::fs::create_dir(&into).unwrap();
    for left in [
        "ragstone.lock",
        "ragstone.db.restoring",
        "ragstone.db.restoring-journal",
    ] {
        std::fs::write(into.join(left), &half[..half.len() / 2]).unwrap();
    }
    let backup = at("backup");
    let repeat = ["restore", text(&backup), "--data-dir", text(&into)];
    assert!(ragstone(&repeat).await.succeeded().contains("50 documents"));
    // What it has put there is data.
    assert!(ragstone(&repeat).await.failed_with(1).contains("--force"));
}

/// Deleted text may remain in free pages of the database until maintenance, but never in a backup.
#[tokio::test]
async fn deleted_text_is_not_in_a_backup() {
    let server = Setup::without_models().start().await;
    server.create("docs").await;
    let secret = |n: usize| {
        let mut secret = document(n);
        secret["text"] = json!("canary-5d1f ".repeat(400));
        secret
    };
    server.add("docs", (0..300).map(secret).collect()).await;
    server.delete("/collections/docs/documents/all").await.ok();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("backup");
    let data = server.setup().data_dir();
    ragstone(&["backup", text(&file), "--data-dir", text(&data)])
        .await
        .succeeded();
    let bytes = std::fs::read(&file).unwrap();
    assert!(!bytes.windows(11).any(|window| window == b"canary-5d1f"));
}

/// By its name, through links, and from within its folder.
#[cfg(unix)]
#[tokio::test]
async fn a_backup_never_lands_on_a_store_or_on_what_is_no_backup() {
    let server = Setup::without_models().start().await;
    fill(&server, "docs", 10).await;
    let data = server.setup().data_dir();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::os::unix::fs::symlink(data.join("ragstone.db"), at("symbolic")).unwrap();
    std::os::unix::fs::symlink(&data, at("folder")).unwrap();
    std::fs::hard_link(data.join("ragstone.db"), at("hard")).unwrap();
    std::fs::write(at("notes.txt"), "mine").unwrap();
    let other = Setup::without_models().start().await;
    let own = "a file of the store itself";
    for (file, expected) in [
        (data.join("ragstone.db"), own),
        (data.join("ragstone.db-wal"), own),
        (data.join("ragstone.db-journal"), own),
        (data.join("ragstone.lock"), own),
        (at("symbolic"), own),
        (at("hard"), own),
        (at("folder").join("ragstone.db-shm"), own),
        (data.join("../data/ragstone.db"), own),
        (other.setup().data_dir().join("ragstone.db"), own),
        (at("notes.txt"), "not a backup"),
        (at("."), "not a file"),
        (at("nowhere").join("x.db"), "there is no folder"),
        ("-".into(), "standard output"),
    ] {
        let refused = ragstone(&["backup", text(&file), "--data-dir", text(&data)]).await;
        let said = refused.failed_with(1);
        assert!(said.contains(expected), "{file:?}: {said}");
    }
    assert_eq!(std::fs::read(at("notes.txt")).unwrap(), b"mine");
    server.add("docs", vec![document(10)]).await;
    // A later backup takes the place of an earlier one.
    for _ in 0..2 {
        ragstone(&["backup", text(&at("backup")), "--data-dir", text(&data)])
            .await
            .succeeded();
    }
    let (live, elsewhere) = (data.join("ragstone.db"), at("elsewhere"));
    let refused = ragstone(&["restore", text(&live), "--data-dir", text(&elsewhere)]).await;
    assert!(
        refused.failed_with(1).contains("a database in use"),
        "{refused:?}"
    );
    let setup = server.kill();
    for file in [live, at("hard")] {
        let refused = ragstone(&["restore", text(&file), "--force", "--data-dir", text(&data)]).await;
        let said = refused.failed_with(1);
        assert!(said.contains("of the store that would be written"), "{said}");
    }
    let server = setup.start().await;
    assert_eq!(server.get("/collections/docs").await.ok()["count"], 11);
}
