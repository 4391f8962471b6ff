//! Keeping credentials out of errors, logs and passed-on answers.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;

use super::settings::Auth;

const HIDDEN: &str = "***";
/// Characters that a URL component escapes.
const COMPONENT: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// The credentials of one service: as configured, as sent, percent-encoded, and escaped as in JSON.
pub(super) struct Secrets(Vec<SecretString>);

impl Secrets {
    pub(super) fn of(auth: &Auth) -> Self {
        let (plain, sent) = match auth {
            Auth::None => return Self(Vec::new()),
            Auth::Bearer(key) | Auth::Header { key, .. } => (key, None),
            Auth::Basic { username, password } => (password, Some(basic_credentials(username, password))),
        };
        let plain = plain.expose_secret();
        let in_json = Value::from(plain).to_string();
        let mut forms = vec![
            plain.to_owned(),
            utf8_percent_encode(plain, COMPONENT).to_string(),
            in_json[1..in_json.len() - 1].to_owned(),
        ];
        forms.extend(sent);
        forms.retain(|form| !form.is_empty());
        forms.sort_unstable();
        forms.dedup();
        Self(forms.into_iter().map(SecretString::from).collect())
    }

    pub(super) fn hide(&self, text: String) -> String {
        self.forms().fold(text, |text, form| {
            if text.contains(form) {
                text.replace(form, HIDDEN)
            } else {
                text
            }
        })
    }

    /// Returns the bytes unchanged if they contain no credential. JSON stays JSON.
    pub(super) fn hide_in_bytes(&self, bytes: Vec<u8>) -> Vec<u8> {
        let text = String::from_utf8_lossy(&bytes);
        if !self.forms().any(|form| text.contains(form)) {
            return bytes;
        }
        match serde_json::from_str::<Value>(&text) {
            Ok(mut json) => {
                self.hide_in_json(&mut json);
                json.to_string().into_bytes()
            }
            Err(_) => self.hide(text.into_owned()).into_bytes(),
        }
    }

    /// The parser bounds the depth of the recursion.
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

    fn forms(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(ExposeSecret::expose_secret)
    }
}

pub(super) fn basic_credentials(username: &str, password: &SecretString) -> String {
    STANDARD.encode(format!("{username}:{}", password.expose_secret()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hidden(token: &str, body: &str) -> String {
        let secrets = Secrets::of(&Auth::Bearer(token.to_owned().into()));
        String::from_utf8(secrets.hide_in_bytes(body.into())).unwrap()
    }

    #[test]
    fn credentials_are_hidden_as_configured_and_as_sent() {
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
        let secrets = Secrets::of(&Auth::Bearer("swordfish".to_owned().into()));
        assert_eq!(secrets.hide_in_bytes(vec![0xff, 0, 7]), [0xff, 0, 7]);
        let odd = r#"{ "b": 1.00, "a":"\u0041\/", "b" : [ ] }"#;
        assert_eq!(hidden("swordfish", odd), odd);
        assert_eq!(hidden("", "nothing to hide"), "nothing to hide");
    }

    #[test]
    fn escaped_credentials_are_hidden() {
        let token = r#"p"ss\wd/longer"#;
        let echoed = serde_json::json!({"detail": format!("you sent {token}"), token: [token, 1.5]});
        assert_eq!(
            hidden(token, &echoed.to_string()),
            r#"{"***":["***",1.5],"detail":"you sent ***"}"#
        );
        for (body, shown) in [
            // Truncated, and so not valid JSON.
            (r#"{"detail":"p\"ss\\wd/longer"#, r#"{"detail":"***"#),
            (r#"p"ss\wd/longer"#, "***"),
            ("?key=p%22ss%5Cwd%2Flonger&x", "?key=***&x"),
        ] {
            assert_eq!(hidden(token, body), shown);
        }
        assert_eq!(
            hidden("12345678", r#"{"n":12345678,"said":"12345678"}"#),
            r#"{"n":12345678,"said":"***"}"#
        );
    }
}
