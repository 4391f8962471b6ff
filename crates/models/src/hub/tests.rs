use super::*;

fn from(variables: &[(&str, &str)]) -> HubSettings {
    HubSettings::from_variables(|name| {
        variables
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| (*value).to_owned())
    })
}

#[test]
fn settings_follow_the_variables_of_huggingface_hub() {
    let plain = from(&[("HOME", "/home/a")]);
    assert_eq!(plain.endpoint, DEFAULT_ENDPOINT);
    assert_eq!(plain.cache, Path::new("/home/a/.cache/huggingface/hub"));
    assert!(!plain.offline && plain.token.is_none());
    assert_eq!(from(&[("HF_HOME", "/h")]).cache, Path::new("/h/hub"));
    assert_eq!(
        from(&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c")]).cache,
        Path::new("/c")
    );
    assert_eq!(
        from(&[("XDG_CACHE_HOME", "/x")]).cache,
        Path::new("/x/huggingface/hub")
    );
    assert_eq!(
        from(&[("HF_ENDPOINT", "http://mirror/")]).endpoint,
        "http://mirror"
    );
    for (value, offline) in [
        ("1", true),
        ("TRUE", true),
        ("yes", true),
        ("0", false),
        ("", false),
    ] {
        assert_eq!(from(&[("HF_HUB_OFFLINE", value)]).offline, offline, "{value:?}");
    }
}

#[test]
fn a_name_is_a_hub_id_only_if_it_can_be_nothing_else() {
    let hub = |id: &str, revision: &str| ModelSource::Hub {
        id: id.to_owned(),
        revision: revision.to_owned(),
    };
    assert_eq!(
        ModelSource::parse("BAAI/bge-reranker-base"),
        hub("BAAI/bge-reranker-base", "main")
    );
    assert_eq!(
        ModelSource::parse("bert-base-uncased"),
        hub("bert-base-uncased", "main")
    );
    assert_eq!(ModelSource::parse("org/name@v1.5"), hub("org/name", "v1.5"));
    for path in [
        "/models/x",
        "./x",
        "../x",
        "a/b/c",
        "org/..",
        "a b/c",
        "org/na..me",
    ] {
        assert!(
            matches!(ModelSource::parse(path), ModelSource::Directory(_)),
            "{path}"
        );
    }
    let directory = tempfile::tempdir().unwrap();
    let text = directory.path().display().to_string();
    assert_eq!(
        ModelSource::parse(&text),
        ModelSource::Directory(directory.path().to_owned())
    );
}
