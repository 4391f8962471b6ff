//! Names of models that become part of a URL.

/// A model in the form of Google's API paths, `models/NAME`. A name that could lead to another path is
/// refused, because the call carries our key.
pub(crate) fn in_google_path(name: &str) -> Result<String, String> {
    let (folder, model) = match name.split_once('/') {
        Some((folder @ ("models" | "tunedModels"), model)) => (folder, model),
        Some(_) => ("models", ""),
        None => ("models", name),
    };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
    if model.is_empty() || !model.chars().all(is_plain) || model.chars().all(|c| c == '.') {
        return Err(
            "a model name is made of letters, digits, '.', '-', '_' and ':', with 'models/' or 'tunedModels/' before it or nothing"
                .to_owned(),
        );
    }
    Ok(format!("{folder}/{model}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_to_a_model_and_nowhere_else() {
        for (name, path) in [
            ("gemini-2.5-flash", "models/gemini-2.5-flash"),
            ("models/text-embedding-004", "models/text-embedding-004"),
            ("tunedModels/mine_1", "tunedModels/mine_1"),
        ] {
            assert_eq!(in_google_path(name).unwrap(), path);
        }
        for name in [
            "",
            "..",
            "models/",
            "models/..",
            "../../v1/secret?x=",
            "models/a/b",
            "files/a",
            "a b",
            "a?b",
            "a#b",
            "a%2e",
            "é",
        ] {
            assert!(in_google_path(name).is_err(), "{name}");
        }
    }
}
