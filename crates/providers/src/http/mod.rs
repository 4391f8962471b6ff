//! The one HTTP client of everything outgoing.
//!
//! A [`ServiceClient`] speaks to one service. A [`Call`] is one logical request: it is sent until it
//! is answered, at most as often as the [`Policy`] says, and never beyond the deadline, which covers
//! all attempts, waits and the reading of the answer together. The calls of one [`operation`] share it.
//!
//! What the client guarantees to the code above it:
//! * it connects only to the host of the configured URL, under the [`AddressRule`], or to the proxy
//!   that the environment names (`HTTP_PROXY`, `HTTPS_PROXY`, `NO_PROXY`) for addresses that are
//!   configured and not private; a redirect is followed within the same origin and refused elsewhere;
//! * no answer takes more memory than the policy allows, and none takes longer than the deadline;
//! * a service that keeps failing is left alone for a while, then tried with one call;
//! * credentials are in no error, no debug output and no log line, also when a service echoes them.

mod address;
mod client;
mod operation;
mod retry;
mod secrets;
mod settings;

pub use address::{AddressRule, NamedHost};
pub use client::{Breaking, ByteStream, Call, HttpAnswer, Repeat, ServiceClient};
pub use operation::{operation, within};
pub use settings::{Auth, ClientSettings, Policy};
