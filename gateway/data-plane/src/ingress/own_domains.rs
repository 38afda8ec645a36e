//! TLS configurations of own domains.

use std::sync::Arc;

use gw_base::service::hostname::host_name;
use gw_base::tls::certificate::Pair;
use gw_shared::id::DomainName;
use gw_shared::net::tls::ClientHello;
use gw_store::Domain;
use lru::LruCache;
use rustls::ServerConfig;
use rustls::sign::{CertifiedKey, SingleCertAndKey};

use super::Ingress;
use crate::limits;

impl Ingress {
    /// The own domain that a connection is for, if the region serves it.
    pub(super) fn own_domain(&self, hello: &ClientHello) -> Option<Arc<Domain>> {
        let name = hello.server_name.as_deref()?;
        let directory = self.directory.get();
        let domain = directory.domain(&host_name(name))?;
        domain.is_served.then(|| Arc::clone(domain))
    }
}

/// The TLS configurations of the own domains whose callers connected last. The certificate of a
/// domain is read with the first handshake that needs it.
pub(crate) struct DomainCertificates {
    /// Configuration for names of the region, which those of the domains are made from.
    made_from: Option<Arc<ServerConfig>>,
    configs: LruCache<DomainName, (Arc<Domain>, Arc<ServerConfig>)>,
}

impl DomainCertificates {
    pub(crate) fn new() -> Self {
        Self {
            made_from: None,
            configs: LruCache::new(limits::DOMAIN_CERTIFICATES),
        }
    }

    /// The configuration for callers of `domain`. Without a certificate for it, that of the region.
    pub(super) fn config(
        &mut self,
        region: &Arc<ServerConfig>,
        domain: &Arc<Domain>,
    ) -> Arc<ServerConfig> {
        if !self
            .made_from
            .as_ref()
            .is_some_and(|it| Arc::ptr_eq(it, region))
        {
            self.configs.clear();
            self.made_from = Some(Arc::clone(region));
        }
        if let Some((known, config)) = self.configs.get(&domain.name)
            && known.has_certificate_of(domain)
        {
            return Arc::clone(config);
        }
        let config = match domain.certificate() {
            None => return Arc::clone(region),
            Some(pair) => pair.and_then(|pair| config_with(region, pair)),
        };
        let config = config.unwrap_or_else(|error| {
            tracing::error!(
                domain = %domain.name, %error,
                "the stored certificate of an own domain cannot be used: its callers get that of \
                 the region; upload it again, or remove the domain and add it again"
            );
            Arc::clone(region)
        });
        let entry = (Arc::clone(domain), Arc::clone(&config));
        self.configs.put(domain.name.clone(), entry);
        config
    }
}

/// A configuration as `region` that serves `pair`. A session ticket resumes only for the server
/// name that it was given for (RFC 8446 §4.6.1), although all configurations share the keys of
/// tickets: rustls compares them.
fn config_with(region: &ServerConfig, pair: Pair) -> Result<Arc<ServerConfig>, String> {
    let key = CertifiedKey::from_der(pair.chain, pair.key, region.crypto_provider())
        .map_err(|error| error.to_string())?;
    let mut config = region.clone();
    config.cert_resolver = Arc::new(SingleCertAndKey::from(key));
    Ok(Arc::new(config))
}
