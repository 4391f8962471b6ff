//! Keeping credentials out of what a service sends back.

use std::ops::Range;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;

use super::escapes::Escapes;
use super::settings::Auth;

const HIDDEN: &str = "***";
/// Anything shorter is hidden only where it stands alone: within words it would blank out ordinary ones.
const LONG: usize = 6;
/// How many layers of backslashes are looked through: JSON in a string of JSON has two. Within each, an
/// address or a page has one layer of its own.
const LAYERS: usize = 3;

/// The credentials of one service, in every form in which they are sent, and those in which a service
/// may repeat them. Escaped ones are found by undoing the escapes.
pub(super) struct Secrets(Vec<SecretString>);

impl Secrets {
    pub(super) fn of(auth: &Auth) -> Self {
        let (plain, sent) = match auth {
            Auth::None => return Self(Vec::new()),
            Auth::Bearer(key) | Auth::Header { key, .. } => (key, None),
            Auth::Basic { username, password } => (password, Some(basic_credentials(username, password))),
        };
        let mut forms = other_forms(plain.expose_secret());
        forms.extend(sent);
        forms.push(plain.expose_secret().to_owned());
        forms.sort_unstable();
        forms.dedup();
        Self(forms.into_iter().map(SecretString::from).collect())
    }

    pub(super) fn hide(&self, text: String) -> String {
        let found = self.find(&text, LAYERS);
        if found.is_empty() {
            return text;
        }
        let mut shown = String::with_capacity(text.len());
        let mut at = 0;
        for Range { start, end } in found {
            shown.push_str(&text[at..start]);
            shown.push_str(HIDDEN);
            at = end;
        }
        shown.push_str(&text[at..]);
        shown
    }

    /// Leaves the bytes as they are where no credential is in them. What was JSON stays JSON.
    pub(super) fn hide_in_bytes(&self, bytes: Vec<u8>) -> Vec<u8> {
        let is_clean = |text: &str| self.find(text, LAYERS).is_empty();
        if bytes.utf8_chunks().all(|chunk| is_clean(chunk.valid())) {
            return bytes;
        }
        if let Ok(mut json) = serde_json::from_slice::<Value>(&bytes) {
            self.hide_in_json(&mut json);
            return json.to_string().into_bytes();
        }
        let mut shown = Vec::with_capacity(bytes.len());
        for chunk in bytes.utf8_chunks() {
            shown.extend_from_slice(self.hide(chunk.valid().to_owned()).as_bytes());
            shown.extend_from_slice(chunk.invalid());
        }
        shown
    }

    /// In texts and in names of fields. The depth is what a parser lets pass.
    fn hide_in_json(&self, json: &mut Value) {
        match json {
            Value::String(text) => *text = self.hide(std::mem::take(text)),
            Value::Array(elements) => elements.iter_mut().for_each(|element| self.hide_in_json(element)),
            Value::Object(fields) => {
                *fields = std::mem::take(fields)
                    .into_iter()
                    .map(|(name, mut value)| {
                        self.hide_in_json(&mut value);
                        (self.hide(name), value)
                    })
                    .collect();
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// Where credentials stand, in order and apart from each other: as they are, or escaped. Takes time
    /// in proportion to the text, whatever it is.
    fn find(&self, text: &str, layers: usize) -> Vec<Range<usize>> {
        if self.0.is_empty() {
            return Vec::new();
        }
        let mut found = self.find_plain(text);
        for escapes in [Escapes::Percent, Escapes::Html] {
            if let Some(plain) = escapes.undo(text) {
                found.extend(escapes.widen(text, &self.find_plain(&plain)));
            }
        }
        if layers > 0
            && let Some(plain) = Escapes::Backslash.undo(text)
        {
            found.extend(Escapes::Backslash.widen(text, &self.find(&plain, layers - 1)));
        }
        apart(found)
    }

    fn find_plain(&self, text: &str) -> Vec<Range<usize>> {
        let mut found = Vec::new();
        for secret in self.0.iter().map(ExposeSecret::expose_secret) {
            if !secret.is_empty() {
                let places = text.match_indices(secret).map(|(at, _)| at..at + secret.len());
                found.extend(places.filter(|place| secret.len() >= LONG || stands_alone(text, place)));
            }
        }
        apart(found)
    }
}

/// In base64 of either alphabet, and as forms send what has blanks in it.
fn other_forms(secret: &str) -> Vec<String> {
    let mut forms: Vec<String> = [&STANDARD, &STANDARD_NO_PAD, &URL_SAFE, &URL_SAFE_NO_PAD]
        .iter()
        .map(|alphabet| alphabet.encode(secret))
        .collect();
    forms.push(secret.replace(' ', "+"));
    forms
}

/// In order, and those that overlap as one.
fn apart(mut places: Vec<Range<usize>>) -> Vec<Range<usize>> {
    places.sort_by_key(|place| place.start);
    places.dedup_by(|later, earlier| {
        let overlap = later.start < earlier.end;
        if overlap {
            earlier.end = earlier.end.max(later.end);
        }
        overlap
    });
    places
}

/// Whether it is no part of a longer word.
fn stands_alone(text: &str, place: &Range<usize>) -> bool {
    let before = text[..place.start].chars().next_back();
    let after = text[place.end..].chars().next();
    ![before, after].into_iter().flatten().any(char::is_alphanumeric)
}

pub(super) fn basic_credentials(username: &str, password: &SecretString) -> String {
    STANDARD.encode(format!("{username}:{}", password.expose_secret()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bearer(token: &str) -> Secrets {
        Secrets::of(&Auth::Bearer(token.to_owned().into()))
    }

    fn hidden(token: &str, body: &str) -> String {
        String::from_utf8(bearer(token).hide_in_bytes(body.into())).unwrap()
    }

    #[test]
    fn credentials_are_hidden_in_all_their_forms() {
        let secrets = Secrets::of(&Auth::Basic {
            username: "ann".into(),
            password: "swordfish".to_owned().into(),
        });
        let encoded = STANDARD.encode("ann:swordfish");
        let echoed = format!("you sent swordfish and {encoded}, swordfish!");
        assert_eq!(secrets.hide(echoed.clone()), "you sent *** and ***, ***!");
        assert_eq!(
            secrets.hide_in_bytes(echoed.into_bytes()),
            b"you sent *** and ***, ***!"
        );
    }

    #[test]
    fn text_without_credentials_stays() {
        let secrets = bearer("swordfish");
        assert_eq!(secrets.hide_in_bytes(vec![0xff, 0, 7]), [0xff, 0, 7]);
        let odd = r#"{ "b": 1.00, "a":"\u0041\/", "b" : [ ] }"#;
        assert_eq!(hidden("swordfish", odd), odd);
    }

    #[test]
    fn what_a_service_escapes_is_hidden_as_well() {
        let token = r#"p"ss\wd/longer"#;
        let echoed = serde_json::json!({"detail": format!("you sent {token}"), token: [token, 1.5]});
        assert_eq!(
            hidden(token, &echoed.to_string()),
            r#"{"***":["***",1.5],"detail":"you sent ***"}"#
        );
        let again = serde_json::json!({"detail": echoed.to_string()}).to_string();
        assert!(!hidden(token, &again).contains("longer"), "{again}");
        for (body, shown) in [
            // Cut off, and so no JSON.
            (r#"{"detail":"p\"ss\\wd\/longer"#, r#"{"detail":"***"#),
            (r#"p"ss\wd/longer"#, "***"),
            (r#"["\u0070\u0022ss\\wd/longer"]"#, r#"["***"]"#),
            (r#"{"a":"p\"ss\\wd\/longer","a":1}"#, r#"{"a":1}"#),
        ] {
            assert_eq!(hidden(token, body), shown);
        }
        assert_eq!(
            hidden("canary-KEY", r#"{"m":"canary\u002dKEY"}"#),
            r#"{"m":"***"}"#
        );
        assert_eq!(
            hidden("schlüssel-🗝", r#"["schl\u00FCssel-\ud83d\uddDD"]"#),
            r#"["***"]"#
        );
    }

    #[test]
    fn what_addresses_pages_and_base64_make_of_one_is_hidden_as_well() {
        let token = "k/ey+<zwölf>&\"4'=";
        let percent = "k%2Fey%2B%3Czw%C3%B6lf%3E%26%224%27%3D";
        for form in [
            percent.to_owned(),
            percent.to_lowercase(),
            percent.replace("%2F", "/").replace("%27", "'"),
            "k/ey+&lt;zwölf&gt;&amp;&quot;4&#39;=".to_owned(),
            "k&#x2F;ey+&lt;zw&#246;lf&gt;&amp;&#34;4&#x27;&#x3D;".to_owned(),
            STANDARD.encode(token),
            URL_SAFE_NO_PAD.encode(token),
        ] {
            assert_eq!(hidden(token, &format!("<{form}>")), "<***>", "{form}");
            let json = serde_json::json!({"detail": format!("not {form}!")}).to_string();
            assert_eq!(hidden(token, &json), r#"{"detail":"not ***!"}"#, "{form}");
        }
        assert_eq!(hidden("pass word/", "?p=pass+word%2F&x"), "?p=***&x");
        let innocent = "100% &amp; %41 a2V5 %6b";
        assert_eq!(hidden("swordfish", innocent), innocent);
    }

    #[test]
    fn a_short_one_is_hidden_where_it_stands_alone() {
        assert_eq!(
            hidden("abc", "Bearer abc, abcd and xabc"),
            "Bearer ***, abcd and xabc"
        );
        assert_eq!(
            hidden("12", r#"{"n":12,"said":"12"}"#),
            r#"{"n":12,"said":"***"}"#
        );
        assert_eq!(hidden("", "nothing to hide"), "nothing to hide");
    }

    /// Takes minutes where the text is read again for each place.
    #[test]
    fn a_body_of_nothing_else_is_read_once() {
        let (token, times) = ("swordfish", 400_000);
        assert_eq!(hidden(token, &token.repeat(times)), HIDDEN.repeat(times));
        let almost = "a".repeat(4_000_000);
        assert_eq!(hidden(&format!("{}b", "a".repeat(8_000)), &almost), almost);
        let escaped = "%61&amp;".repeat(500_000);
        assert_eq!(hidden(&format!("{}b", "a&".repeat(4_000)), &escaped), escaped);
    }
}
