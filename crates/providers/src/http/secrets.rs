//! Keeping credentials out of what a service sends back.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use secrecy::{ExposeSecret, SecretString};

use super::settings::Auth;

const HIDDEN: &str = "***";
/// Anything shorter would blank out ordinary words.
const SHORTEST: usize = 6;

/// The credentials of one service, in every form in which they are sent.
pub(super) struct Secrets(Vec<SecretString>);

impl Secrets {
    pub(super) fn of(auth: &Auth) -> Self {
        Self(match auth {
            Auth::None => Vec::new(),
            Auth::Bearer(key) | Auth::Header { key, .. } => vec![key.clone()],
            Auth::Basic { username, password } => {
                vec![
                    password.clone(),
                    SecretString::from(basic_credentials(username, password)),
                ]
            }
        })
    }

    pub(super) fn hide(&self, text: String) -> String {
        self.worth_hiding().fold(text, |text, secret| {
            if text.contains(secret) {
                text.replace(secret, HIDDEN)
            } else {
                text
            }
        })
    }

    /// Leaves the bytes as they are where no credential is in them.
    pub(super) fn hide_in_bytes(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        for secret in self.worth_hiding().map(str::as_bytes) {
            while let Some(at) = bytes.windows(secret.len()).position(|window| window == secret) {
                bytes.splice(at..at + secret.len(), HIDDEN.bytes());
            }
        }
        bytes
    }

    fn worth_hiding(&self) -> impl Iterator<Item = &str> {
        self.0
            .iter()
            .map(ExposeSecret::expose_secret)
            .filter(|secret| secret.len() >= SHORTEST)
    }
}

pub(super) fn basic_credentials(username: &str, password: &SecretString) -> String {
    STANDARD.encode(format!("{username}:{}", password.expose_secret()))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let secrets = Secrets::of(&Auth::Bearer("swordfish".to_owned().into()));
        assert_eq!(secrets.hide_in_bytes(vec![0xff, 0, 7]), [0xff, 0, 7]);
    }
}
