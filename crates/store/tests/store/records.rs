//! Records through the `Records` trait.

use ragstone_core::records::{Applied, Expect, RecordChange, RecordCounts, RecordRange};

use crate::common::*;

on_every_store!(
    changes_are_made_as_far_as_their_expectations_hold,
    versions_go_on_after_reopening,
    lists_are_paged_by_key_and_group,
    a_claim_is_exclusive_until_its_lease_ends,
);

fn put(key: &str, value: &str, run_at: Option<i64>, expect: Expect) -> RecordChange {
    RecordChange::Put {
        kind: "job".into(),
        key: key.into(),
        group: if key.starts_with('g') {
            "group".into()
        } else {
            String::new()
        },
        value: value.into(),
        run_at,
        expect,
    }
}

fn delete(key: &str, expect: Expect) -> RecordChange {
    RecordChange::Delete {
        kind: "job".into(),
        key: key.into(),
        expect,
    }
}

fn version(applied: &Applied) -> u64 {
    match applied {
        Applied::Done { version } => *version,
        Applied::Skipped => panic!("skipped"),
    }
}

async fn changes_are_made_as_far_as_their_expectations_hold(engine: Engine) {
    let home = Home::new(engine).await;
    let store = home.open().await;
    let first = store
        .apply(vec![put("a", "1", None, Expect::Absent)])
        .await
        .unwrap();
    let applied = store
        .apply(vec![
            put("a", "2", None, Expect::Absent),
            put("a", "3", None, Expect::Version(version(&first[0]))),
            put("a", "4", None, Expect::Version(version(&first[0]))),
            put("b", "5", None, Expect::Anything),
            delete("nobody", Expect::Anything),
        ])
        .await
        .unwrap();
    assert_eq!(applied[0], Applied::Skipped);
    assert!(version(&applied[1]) > version(&first[0]));
    assert_eq!(applied[2], Applied::Skipped);
    assert_eq!(applied[4], Applied::Skipped);
    let found = store
        .get("job", &["a".into(), "b".into(), "c".into()])
        .await
        .unwrap();
    let values: Vec<&[u8]> = found.iter().map(|r| r.value.as_slice()).collect();
    assert_eq!(values, [b"3", b"5"]);
    assert_eq!(store.get("other", &["a".into()]).await.unwrap(), []);

    let gone = store.apply(vec![delete("a", Expect::Anything)]).await.unwrap();
    assert_eq!(version(&gone[0]), version(&applied[1]));
    let again = store
        .apply(vec![put("a", "6", None, Expect::Absent)])
        .await
        .unwrap();
    assert!(version(&again[0]) > version(&gone[0]));
}

async fn versions_go_on_after_reopening(engine: Engine) {
    let home = Home::new(engine).await;
    let before = {
        let store = home.open().await;
        let applied = store
            .apply(vec![put("a", "1", None, Expect::Anything)])
            .await
            .unwrap();
        store.apply(vec![delete("a", Expect::Anything)]).await.unwrap();
        version(&applied[0])
    };
    let store = home.open().await;
    let applied = store
        .apply(vec![put("a", "1", None, Expect::Absent)])
        .await
        .unwrap();
    assert!(version(&applied[0]) > before);
}

async fn lists_are_paged_by_key_and_group(engine: Engine) {
    let home = Home::new(engine).await;
    let store = home.open().await;
    let keys = ["", "a", "b", "g1", "g2", "g3"];
    let changes = keys
        .iter()
        .map(|key| put(key, key, None, Expect::Anything))
        .collect();
    store.apply(changes).await.unwrap();
    let list = async |group: Option<&str>, after: Option<&str>, limit| {
        let range = RecordRange {
            group: group.map(Into::into),
            after: after.map(Into::into),
            limit,
        };
        let found = store.list("job", range).await.unwrap();
        found.into_iter().map(|r| r.key).collect::<Vec<_>>()
    };
    assert_eq!(list(None, None, 100).await, keys);
    assert_eq!(list(None, Some("a"), 2).await, ["b", "g1"]);
    assert_eq!(list(Some("group"), None, 2).await, ["g1", "g2"]);
    assert_eq!(list(Some("group"), Some("g2"), 2).await, ["g3"]);
    assert_eq!(list(Some(""), None, 100).await, ["", "a", "b"]);
    assert_eq!(list(Some("nobody"), None, 100).await, Vec::<String>::new());
    assert_eq!(
        store.counts("job").await.unwrap(),
        RecordCounts { total: 6, waiting: 0 }
    );
}

async fn a_claim_is_exclusive_until_its_lease_ends(engine: Engine) {
    let home = Home::new(engine).await;
    let store = home.open().await;
    let changes = (0..100).map(|n| put(&format!("k{n:03}"), "v", Some(100 - n), Expect::Anything));
    store.apply(changes.collect()).await.unwrap();
    store
        .apply(vec![put("later", "v", Some(5000), Expect::Anything)])
        .await
        .unwrap();
    assert_eq!(
        store.counts("job").await.unwrap(),
        RecordCounts {
            total: 101,
            waiting: 101
        }
    );

    let first = store.claim("job", 2, 1000, 2000).await.unwrap();
    let keys: Vec<&str> = first.iter().map(|r| r.key.as_str()).collect();
    assert_eq!(keys, ["k099", "k098"], "the longest due first");
    let claims = (0..20).map(|_| store.claim("job", 7, 1000, 2000));
    let claimed = futures::future::try_join_all(claims).await.unwrap();
    let mut keys: Vec<String> = claimed.into_iter().flatten().map(|r| r.key).collect();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), 98, "everything that was due, each once");

    // The lease ends: another gets it, and the first can no longer finish it.
    let second = store.claim("job", 100, 2000, 3000).await.unwrap();
    assert_eq!(second.len(), 100);
    let taken = second.iter().find(|r| r.key == first[0].key).unwrap();
    let late = put(&first[0].key, "late", None, Expect::Version(first[0].version));
    let done = put(&first[0].key, "done", None, Expect::Version(taken.version));
    let applied = store.apply(vec![late, done]).await.unwrap();
    assert_eq!(applied[0], Applied::Skipped);
    assert!(matches!(applied[1], Applied::Done { .. }));
    assert_eq!(
        store.counts("job").await.unwrap(),
        RecordCounts {
            total: 101,
            waiting: 100
        }
    );
}
