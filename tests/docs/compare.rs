//! Comparison of documented output with real output.

use regex::Regex;

const TOLERANCE: f64 = 0.01;

/// Replaces everything that differs from run to run, and removes whitespace.
fn normalize(text: &str) -> String {
    let volatile = [
        (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID"),
        (r"\b[0-9a-f]{32,}\b", "HEX"),
        (r"\d{4}-\d\d-\d\dT[0-9:.]+Z", "TIME"),
        (r"\b\d+(\.\d+)? ?m?s\b", "DURATION"),
    ];
    let text = volatile.iter().fold(text.to_owned(), |text, (pattern, name)| {
        Regex::new(pattern)
            .expect("a pattern")
            .replace_all(&text, *name)
            .into_owned()
    });
    text.split_whitespace().collect()
}

/// Whether the output is as documented; `…` matches anything, and decimal fractions may differ a little.
pub fn matches(documented: &str, real: &str) -> bool {
    let decimal = Regex::new(r"\d+\.\d+").expect("a pattern");
    let documented = normalize(documented);
    let literal = |text: &str| regex::escape(text).replace('…', ".*?");
    let mut pattern = String::from("(?s)^");
    let mut numbers: Vec<f64> = Vec::new();
    let mut end = 0;
    for number in decimal.find_iter(&documented) {
        pattern += &literal(&documented[end..number.start()]);
        pattern += r"(\d+\.\d+|\d+)";
        numbers.push(number.as_str().parse().expect("a number"));
        end = number.end();
    }
    pattern += &literal(&documented[end..]);
    pattern.push('$');
    let real = normalize(real);
    let Some(found) = Regex::new(&pattern).expect("a pattern").captures(&real) else {
        return false;
    };
    let is_near = |(index, number): (usize, &f64)| {
        let real: f64 = found[index + 1].parse().expect("a number");
        (real - number).abs() <= TOLERANCE
    };
    numbers.iter().enumerate().all(is_near)
}

#[test]
fn volatile_parts_and_small_differences_are_ignored_and_nothing_else() {
    let documented = r#"{"results": [{"id": "a", "distance": 0.712}, …], "time": "2026-01-01T00:00:00Z"}"#;
    let real = |id: &str, distance: f64| {
        format!(
            "{{\"results\":[{{\"id\":\"{id}\",\"distance\":{distance}}},{{}}],\"time\":\"2026-02-03T04:05:06.7Z\"}}\n"
        )
    };
    assert!(matches(documented, &real("a", 0.7116)));
    assert!(!matches(documented, &real("a", 0.74)));
    assert!(!matches(documented, &real("b", 0.7116)));
    assert!(matches("ingested 3 files in 0.3 s", "ingested 3 files in 12 ms"));
    assert!(!matches("ingested 3 files", "ingested 4 files"));
    assert!(!matches("a", "a\nb"));
}
