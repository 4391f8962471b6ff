//! Rules for the addresses that the client may connect to.
//!
//! The host of a URL in the operator's configuration may be private. But a host name must not lead to an
//! address that nobody named: to a metadata service on a link-local address or, for a URL that came in
//! over the API, into the private network.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum AddressRule {
    /// The URL comes from the operator. Any address in it is allowed, and so is `localhost`. A name may
    /// resolve to any address except a link-local one.
    #[default]
    Configured,
    /// Like the former, but names must resolve to public addresses.
    PublicNames,
    /// The URL comes from a client. Only public addresses are allowed, except for hosts that the operator's
    /// configuration names.
    Foreign { allowed: Vec<NamedHost> },
}

/// A host that may have a private address, because the operator named it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedHost {
    host: String,
    /// Other ports of the host are not allowed. `None` allows every port.
    port: Option<u16>,
}

impl NamedHost {
    /// The host and the port of a URL.
    pub fn of_url(url: &str) -> Option<Self> {
        let url = Url::parse(url).ok()?;
        Some(Self {
            host: url.host_str()?.to_owned(),
            port: Some(url.port_or_known_default()?),
        })
    }

    pub fn with_all_ports(host: impl Into<String>) -> Self {
        Self {
            host: host.into(),
            port: None,
        }
    }

    fn covers(&self, host: &str, port: Option<u16>) -> bool {
        self.host.eq_ignore_ascii_case(host) && (self.port.is_none() || self.port == port)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AddressScope {
    Public,
    Private,
    /// Link-local addresses, which metadata services use, and addresses that no service can have.
    Never,
}

impl AddressRule {
    /// Checks a URL as far as possible before its name is resolved.
    pub(super) fn check_url(&self, url: &Url) -> Result<(), String> {
        let host = url.host_str().unwrap_or_default();
        let port = url.port_or_known_default();
        let allowed = match literal(host) {
            Some(ip) => self.names(host, port) || scope(ip) == AddressScope::Public,
            None => !is_localhost(host) || self.names(host, port),
        };
        if allowed {
            return Ok(());
        }
        Err(format!(
            "'{host}' is a private address: only the hosts and ports that the configuration file names can be tried"
        ))
    }

    /// Whether the configuration names this host and port, so that it may be private.
    fn names(&self, host: &str, port: Option<u16>) -> bool {
        match self {
            Self::Configured | Self::PublicNames => literal(host).is_some() || is_localhost(host),
            Self::Foreign { allowed } => allowed.iter().any(|named| named.covers(host, port)),
        }
    }

    fn admits(&self, host: &str, port: Option<u16>, ip: IpAddr) -> bool {
        match (self, scope(ip)) {
            (_, AddressScope::Public) => true,
            (Self::Configured, AddressScope::Private) => true,
            (_, AddressScope::Private) => self.names(host, port),
            (_, AddressScope::Never) => false,
        }
    }
}

/// Resolves names through the system and drops the addresses that the rule does not allow.
#[derive(Debug, Clone)]
pub(super) struct GuardedResolver {
    pub(super) rule: AddressRule,
    /// The only port that the client connects to: it follows no redirect to another.
    pub(super) port: Option<u16>,
}

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let Self { rule, port } = self.clone();
        Box::pin(async move {
            let host = name.as_str();
            let found: Vec<SocketAddr> = tokio::net::lookup_host((host, 0)).await?.collect();
            let admitted: Vec<SocketAddr> = found
                .into_iter()
                .filter(|address| rule.admits(host, port, address.ip()))
                .collect();
            if admitted.is_empty() {
                return Err(format!("'{host}' leads to no address that may be connected to").into());
            }
            Ok(Box::new(admitted.into_iter()) as Addrs)
        })
    }
}

pub(super) fn is_local(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    is_localhost(host) || literal(host).is_some_and(|ip| scope(ip) != AddressScope::Public)
}

fn is_localhost(host: &str) -> bool {
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    host == "localhost" || host.ends_with(".localhost")
}

fn literal(host: &str) -> Option<IpAddr> {
    host.trim_start_matches('[').trim_end_matches(']').parse().ok()
}

fn scope(ip: IpAddr) -> AddressScope {
    match ip {
        IpAddr::V4(ip) => scope_v4(ip),
        IpAddr::V6(ip) => scope_v6(ip),
    }
}

fn scope_v4(ip: Ipv4Addr) -> AddressScope {
    let [a, b, c, _] = ip.octets();
    if ip.is_link_local() || ip.is_multicast() || ip.is_broadcast() || a == 0 || a >= 240 {
        AddressScope::Never
    } else if ip.is_private()
        || ip.is_loopback()
        || ip.is_documentation()
        || (a == 100 && (64..128).contains(&b))
        || (a == 198 && (b == 18 || b == 19))
        || (a == 192 && b == 0 && c == 0)
    {
        AddressScope::Private
    } else {
        AddressScope::Public
    }
}

fn scope_v6(ip: Ipv6Addr) -> AddressScope {
    let parts = ip.segments();
    let embedded = |high: u16, low: u16| {
        let [a, b] = high.to_be_bytes();
        let [c, d] = low.to_be_bytes();
        scope_v4(Ipv4Addr::new(a, b, c, d))
    };
    /// The metadata service of a large cloud, in the private range.
    const METADATA: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);
    if ip.is_loopback() {
        AddressScope::Private
    } else if ip.is_unspecified() || ip.is_multicast() || ip.is_unicast_link_local() || ip == METADATA {
        AddressScope::Never
    } else if let Some(v4) = ip.to_ipv4_mapped() {
        scope_v4(v4)
    } else if parts[..6] == [0x64, 0xff9b, 0, 0, 0, 0] || parts[..6] == [0; 6] {
        embedded(parts[6], parts[7])
    } else if parts[0] == 0x2002 {
        embedded(parts[1], parts[2])
    } else if ip.is_unique_local() || parts[..2] == [0x2001, 0xdb8] || parts[..2] == [0x64, 0xff9b] {
        AddressScope::Private
    } else {
        AddressScope::Public
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rule: &AddressRule, url: &str) -> bool {
        rule.check_url(&Url::parse(url).unwrap()).is_ok()
    }

    #[test]
    fn addresses_have_their_scope() {
        for (address, expected) in [
            ("8.8.8.8", AddressScope::Public),
            ("127.0.0.1", AddressScope::Private),
            ("10.1.2.3", AddressScope::Private),
            ("172.31.0.1", AddressScope::Private),
            ("100.64.0.1", AddressScope::Private),
            ("169.254.169.254", AddressScope::Never),
            ("0.0.0.0", AddressScope::Never),
            ("255.255.255.255", AddressScope::Never),
            ("224.0.0.1", AddressScope::Never),
            ("2606:4700::1111", AddressScope::Public),
            ("::1", AddressScope::Private),
            ("::", AddressScope::Never),
            ("fe80::1", AddressScope::Never),
            ("fd12::1", AddressScope::Private),
            ("fd00:ec2::254", AddressScope::Never),
            ("::ffff:169.254.169.254", AddressScope::Never),
            ("::ffff:10.0.0.1", AddressScope::Private),
            ("::7f00:1", AddressScope::Private),
            ("64:ff9b::a9fe:a9fe", AddressScope::Never),
            ("2002:a00:1::1", AddressScope::Private),
        ] {
            assert_eq!(scope(address.parse().unwrap()), expected, "{address}");
        }
    }

    #[test]
    fn the_operator_may_name_any_address() {
        for url in [
            "http://127.0.0.1:1",
            "http://localhost",
            "http://[::1]/",
            "http://169.254.169.254/",
        ] {
            assert!(check(&AddressRule::Configured, url), "{url}");
            assert!(check(&AddressRule::PublicNames, url), "{url}");
        }
    }

    #[test]
    fn a_client_may_name_public_addresses_and_what_is_configured_only() {
        let rule = AddressRule::Foreign {
            allowed: vec![
                NamedHost::of_url("http://127.0.0.1:8000/v1").unwrap(),
                NamedHost::of_url("https://10.0.0.7").unwrap(),
                NamedHost::with_all_ports("[::1]"),
            ],
        };
        for url in [
            "http://127.0.0.1:8000",
            "http://10.0.0.7:443",
            "http://[::1]:1",
            "http://[::1]:2",
            "http://chroma:8000",
            "http://example.com",
            "http://8.8.8.8",
        ] {
            assert!(check(&rule, url), "{url}");
        }
        for url in [
            "http://localhost",
            "http://127.0.0.1",
            "http://127.0.0.1:8001",
            "http://10.0.0.7",
            "http://10.0.0.1",
            "http://169.254.169.254",
            "http://0x7f.1.1.1",
        ] {
            assert!(!check(&rule, url), "{url}");
        }
    }

    #[test]
    fn names_lead_where_the_rule_admits() {
        let (private, metadata) = ("10.0.0.5".parse().unwrap(), "169.254.169.254".parse().unwrap());
        let foreign = AddressRule::Foreign {
            allowed: vec![NamedHost::of_url("http://chroma:8000").unwrap()],
        };
        let (named, other) = (Some(8000), Some(22));
        assert!(AddressRule::Configured.admits("chroma", other, private));
        assert!(!AddressRule::Configured.admits("chroma", other, metadata));
        assert!(!AddressRule::PublicNames.admits("chroma", other, private));
        assert!(AddressRule::PublicNames.admits("localhost", other, "127.0.0.1".parse().unwrap()));
        assert!(foreign.admits("chroma", named, private));
        assert!(!foreign.admits("chroma", other, private));
        assert!(!foreign.admits("other", named, private));
        assert!(!foreign.admits("chroma", named, metadata));
    }
}
