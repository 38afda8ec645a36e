//! The agent's state folder: who it is and where its gateway is. Written at enrollment, read at every start.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use serde::{Deserialize, Serialize};

/// `agent.json`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Enrollment {
    /// Host and port that tunnels are opened to.
    pub gateway_host: String,
    pub gateway_port: u16,
    /// Hostnames of the services that this agent serves.
    pub services: Vec<String>,
}

/// The files of a state folder.
#[derive(Debug, Clone)]
pub struct StateDir(PathBuf);

#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("{path}: {error}")]
    Io { path: String, error: io::Error },
    #[error("{path}: {error}")]
    Json { path: String, error: serde_json::Error },
    #[error("{path}: {error}")]
    Pem { path: String, error: rustls_pki_types::pem::Error },
}

/// What an agent authenticates with.
pub struct Identity {
    pub certificate: CertificateDer<'static>,
    pub key: PrivateKeyDer<'static>,
}

impl StateDir {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    pub fn enrollment(&self) -> Result<Enrollment, StateError> {
        let path = self.0.join("agent.json");
        let text = fs::read(&path).map_err(|error| StateError::Io { path: name(&path), error })?;
        serde_json::from_slice(&text).map_err(|error| StateError::Json { path: name(&path), error })
    }

    /// Read at every connection: renewal replaces the files while the agent runs.
    pub fn identity(&self) -> Result<Identity, StateError> {
        let (certificate, key) = (self.0.join("agent.crt"), self.0.join("agent.key"));
        Ok(Identity {
            certificate: CertificateDer::from_pem_file(&certificate)
                .map_err(|error| StateError::Pem { path: name(&certificate), error })?,
            key: PrivateKeyDer::from_pem_file(&key).map_err(|error| StateError::Pem { path: name(&key), error })?,
        })
    }

    /// Authorities that the gateway's certificate may be of, if they are not the system's.
    pub fn gateway_authorities(&self) -> Result<Option<Vec<CertificateDer<'static>>>, StateError> {
        let path = self.0.join("gateway-ca.crt");
        if !path.exists() {
            return Ok(None);
        }
        CertificateDer::pem_file_iter(&path)
            .and_then(Iterator::collect)
            .map(Some)
            .map_err(|error| StateError::Pem { path: name(&path), error })
    }

    /// Writes a whole state folder (mode 0700, files 0600).
    pub fn write(
        &self,
        enrollment: &Enrollment,
        certificate_pem: &str,
        key_pem: &str,
        gateway_ca_pem: Option<&str>,
    ) -> io::Result<()> {
        use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.0)?;
        let put = |name: &str, contents: &[u8]| {
            let mut options = fs::OpenOptions::new();
            let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(self.0.join(name))?;
            io::Write::write_all(&mut file, contents)?;
            file.sync_all()
        };
        put("agent.crt", certificate_pem.as_bytes())?;
        put("agent.key", key_pem.as_bytes())?;
        if let Some(pem) = gateway_ca_pem {
            put("gateway-ca.crt", pem.as_bytes())?;
        }
        // Last: it is what says that the agent is enrolled.
        put("agent.json", &serde_json::to_vec_pretty(enrollment)?)
    }
}

fn name(path: &Path) -> String {
    path.display().to_string()
}
