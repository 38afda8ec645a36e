//! Address and token of the admin listener.

pub(crate) mod healthy;

use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use gw_base::process::file_owner::FileOwner;
use gw_control_plane::admin_client::{AdminAddress, URL_DEFAULT};
use gw_gateway::process::config_file::ConfigFile;
use gw_interface::config::Config;
use gw_shared::command::Failure;
use gw_shared::identity::secret::Secret;
use gw_store::Sealing;

use super::api::Api;
use super::output::Output;

const NO_TOKEN: &str = "no admin token: set GW_ADMIN_TOKEN, or name the file that holds it with \
                        --admin-token-file, or the gateway's own configuration with --config, such \
                        as --config /etc/gw/gateway.toml";

/// What names an admin listener. Options take precedence over environment variables.
#[derive(Args, Default)]
#[command(next_help_heading = "Connection to the gateway")]
pub(crate) struct ListenerOptions {
    /// URL of the admin listener, http or https [env: GW_ADMIN_URL] [default:
    /// http://127.0.0.1:9080].
    #[arg(long, global = true, value_name = "URL")]
    admin_url: Option<String>,
    /// PEM file of the authorities trusted to issue the certificate of the admin listener [env:
    /// GW_ADMIN_CA] [default: those of the system].
    #[arg(long, global = true, value_name = "FILE")]
    admin_ca: Option<PathBuf>,
    /// Configuration file of a gateway on this machine, from which the address and the token are
    /// read.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// An admin listener and the token for it.
#[derive(Args, Default)]
#[command(next_help_heading = "Connection to the gateway")]
pub(crate) struct AdminConnection {
    #[command(flatten)]
    listener: ListenerOptions,
    /// File with the admin token [env: GW_ADMIN_TOKEN_FILE, or GW_ADMIN_TOKEN for the token
    /// itself].
    #[arg(long, global = true, value_name = "FILE")]
    admin_token_file: Option<PathBuf>,
    /// Print the JSON of the administration API instead of tables.
    #[arg(long, global = true, help_heading = None::<&str>)]
    json: bool,
}

/// An admin listener and its token.
#[derive(Debug)]
pub(crate) struct AdminEndpoint {
    pub(crate) address: AdminAddress,
    pub(crate) token: Secret,
    /// Source of the token, for errors.
    pub(crate) token_source: String,
}

impl ListenerOptions {
    /// Options that name the gateway on this machine with this configuration file.
    fn of(config: &Path) -> Self {
        Self {
            config: Some(config.to_owned()),
            ..Self::default()
        }
    }

    /// The configuration that was named, if one was.
    fn load_config(
        &self,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Config>, Failure> {
        self.config
            .as_deref()
            .map(|path| load_config(path, environment))
            .transpose()
    }

    /// The address of the listener; `config` is [`Self::load_config`].
    fn address(
        &self,
        config: Option<&Config>,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<AdminAddress, Failure> {
        let variable = |name| environment(name).filter(|value| !value.is_empty());
        let authorities = self
            .admin_ca
            .clone()
            .or_else(|| variable("GW_ADMIN_CA").map(PathBuf::from));
        let authorities = authorities.as_deref();
        let address = match (&self.admin_url, config) {
            (Some(url), _) => AdminAddress::at(url, authorities),
            (None, Some(config)) => AdminAddress::of(config, authorities),
            (None, None) => AdminAddress::at(
                variable("GW_ADMIN_URL").as_deref().unwrap_or(URL_DEFAULT),
                authorities,
            ),
        };
        address.map_err(Failure::Usage)
    }
}

impl AdminConnection {
    /// To the gateway on this machine with this configuration file.
    pub(crate) fn of(config: &Path) -> Self {
        Self {
            listener: ListenerOptions::of(config),
            ..Self::default()
        }
    }

    pub(crate) fn open(&self) -> Result<Output, Failure> {
        Ok(Output::new(self.open_api()?, self.json))
    }

    pub(crate) fn open_api(&self) -> Result<Api, Failure> {
        self.endpoint(|name| std::env::var(name).ok()).map(Api::new)
    }

    /// The configuration file of the gateway at this address; `None` if another address is named.
    /// GW_ADMIN_URL is not used with a configuration file.
    pub(crate) fn own_config_file(&self) -> Option<&Path> {
        let ListenerOptions {
            admin_url, config, ..
        } = &self.listener;
        config.as_deref().filter(|_| admin_url.is_none())
    }

    /// Whether JSON is wanted.
    pub(crate) fn json(&self) -> bool {
        self.json
    }

    fn endpoint(
        &self,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<AdminEndpoint, Failure> {
        let variable = |name| environment(name).filter(|value| !value.is_empty());
        let config = self.listener.load_config(&environment)?;
        let address = self.listener.address(config.as_ref(), &environment)?;
        let (token, token_source) =
            match (&self.admin_token_file, &config, variable("GW_ADMIN_TOKEN")) {
                (Some(file), ..) => read_token(file),
                // The file is of no use without the key that seals it.
                (None, Some(config), token) => read_token_in(config).or_else(|error| {
                    token
                        .map(|token| (token, "GW_ADMIN_TOKEN".to_owned()))
                        .ok_or(error)
                }),
                (None, None, Some(token)) => Ok((token, "GW_ADMIN_TOKEN".to_owned())),
                (None, None, None) => match variable("GW_ADMIN_TOKEN_FILE") {
                    Some(file) => read_token(Path::new(&file)),
                    None => Err(NO_TOKEN.to_owned()),
                },
            }
            .map_err(Failure::Usage)?;
        let token = Secret::new(token.trim().to_owned());
        if token.reveal().is_empty() || !token.reveal().bytes().all(|byte| byte.is_ascii_graphic())
        {
            let message = format!(
                "{token_source} holds no admin token: a token is one line of printable ASCII, as \
                 in admin.token in the data_dir of the gateway"
            );
            return Err(Failure::Usage(message));
        }
        Ok(AdminEndpoint {
            address,
            token,
            token_source,
        })
    }
}

pub(crate) fn load_config(
    path: &Path,
    environment: impl Fn(&str) -> Option<String>,
) -> Result<Config, Failure> {
    let file = ConfigFile::read(path).map_err(Failure::Usage)?;
    Config::parse(file.text(), environment)
        .map_err(|errors| Failure::Usage(format!("{}: {errors}", path.display())))
}

/// The token in a data folder, read with the rights of its owner, and opened if it is sealed.
fn read_token_in(config: &Config) -> Result<(String, String), String> {
    let file = config.data_dir.join("admin.token");
    let failed = |error: &dyn std::fmt::Display| {
        let remedy = match file.try_exists() {
            Ok(false) if config.data_dir.exists() => {
                "it is lost: start the gateway again, which makes a new one"
            }
            Ok(false) => "check data_dir; the gateway makes the file when it starts",
            _ => "run the command as root, or as the user of the gateway",
        };
        let file = file.display().to_string();
        let error = error.to_string();
        // The error of the store has the path.
        let error = match error.strip_prefix("store: ") {
            Some(error) if error.starts_with(&file) => error.to_owned(),
            _ => format!("{file}: {error}"),
        };
        format!("cannot read the admin token: {error}; {remedy}")
    };
    let sealing = Sealing::load(config.seal_key.as_deref()).map_err(|error| failed(&error))?;
    let read =
        FileOwner::of(&config.data_dir).and_then(|owner| owner.run(|| sealing.read_file(&file)));
    let token = read
        .map_err(|error| failed(&error))?
        .map_err(|error| failed(&error))?;
    Ok((token, file.display().to_string()))
}

/// The token and its source.
fn read_token(file: &Path) -> Result<(String, String), String> {
    let source = file.display().to_string();
    match std::fs::read_to_string(file) {
        Ok(token) => Ok((token, source)),
        Err(error) => Err(format!(
            "cannot read the admin token: {source}: {error}; {}",
            remedy(file, &error)
        )),
    }
}

/// What to do about a file with an admin token that cannot be read.
fn remedy(file: &Path, error: &io::Error) -> String {
    use std::os::unix::fs::MetadataExt;
    match (error.kind(), std::fs::metadata(file)) {
        (io::ErrorKind::PermissionDenied, Ok(about)) => format!(
            "the file belongs to user {} (mode {:04o}): run the command as that user or as root, \
             such as with sudo",
            about.uid(),
            about.mode() & 0o7777
        ),
        (io::ErrorKind::PermissionDenied, Err(_)) => {
            "this user may not enter its folder: run the command as root, such as with \
             sudo"
                .to_owned()
        }
        (io::ErrorKind::NotFound, _) => {
            "the gateway writes its token to admin.token in its data_dir; --config FILE with the \
             gateway's own configuration finds it"
                .to_owned()
        }
        _ => "name the file that holds the token".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn endpoint(
        connection: &AdminConnection,
        environment: &[(&str, &str)],
    ) -> Result<AdminEndpoint, String> {
        let variable = |name: &str| {
            environment
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| (*value).to_owned())
        };
        connection
            .endpoint(variable)
            .map_err(|failure| match failure {
                Failure::Usage(message) => message,
                Failure::Run(message) | Failure::Internal(message) => {
                    panic!("not a matter of usage: {message}")
                }
            })
    }

    #[test]
    fn options_override_variables_which_override_defaults() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = directory.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        file("admin.token", "of-config\n");
        let config = format!(
            "region = \"eu1\"\ndomain = \"example.com\"\ndata_dir = {:?}\n\
             admin_listen = \"[::]:9090\"\n",
            directory.path()
        );
        let mut options = AdminConnection {
            listener: ListenerOptions {
                admin_url: Some("http://option:1/".to_owned()),
                config: Some(file("gateway.toml", &config)),
                ..ListenerOptions::default()
            },
            admin_token_file: Some(file("option", "of-option\n")),
            json: false,
        };
        let of_variable = file("variable", "of-file\n");
        let mut variables = vec![
            ("GW_ADMIN_URL", "http://variable:2"),
            ("GW_ADMIN_TOKEN", "of-variable"),
            ("GW_ADMIN_TOKEN_FILE", of_variable.to_str().unwrap()),
        ];
        let found = |options: &AdminConnection, variables: &[(&str, &str)]| {
            let AdminEndpoint { address, token, .. } = endpoint(options, variables).unwrap();
            (address.url, token.reveal().to_owned())
        };
        let expect = |url: &str, token: &str| (url.to_owned(), token.to_owned());

        assert_eq!(
            found(&options, &variables),
            expect("http://option:1", "of-option")
        );
        (options.listener.admin_url, options.admin_token_file) = (None, None);
        assert_eq!(
            found(&options, &variables),
            expect("http://[::1]:9090", "of-config")
        );
        options.listener.config = None;
        assert_eq!(
            found(&options, &variables),
            expect("http://variable:2", "of-variable")
        );
        variables[1].1 = "";
        assert_eq!(
            found(&options, &variables),
            expect("http://variable:2", "of-file")
        );
        variables.remove(0);
        assert_eq!(found(&options, &variables), expect(URL_DEFAULT, "of-file"));
        assert_eq!(endpoint(&options, &[]).unwrap_err(), NO_TOKEN);
    }

    #[test]
    fn invalid_tokens_and_authorities_are_refused_by_name() {
        let error = endpoint(
            &AdminConnection::default(),
            &[("GW_ADMIN_TOKEN", "t"), ("GW_ADMIN_CA", "/nowhere/ca")],
        );
        assert!(error.unwrap_err().starts_with("--admin-ca /nowhere/ca: "));
        let token = |token| {
            endpoint(&AdminConnection::default(), &[("GW_ADMIN_TOKEN", token)]).unwrap_err()
        };
        for wrong in [" ", "two words", "line\nline", "caf\u{e9}"] {
            assert!(
                token(wrong).starts_with("GW_ADMIN_TOKEN holds no admin token"),
                "{wrong}"
            );
        }
        let nowhere = AdminConnection {
            admin_token_file: Some("/nowhere/token".into()),
            ..AdminConnection::default()
        };
        assert!(
            endpoint(&nowhere, &[])
                .unwrap_err()
                .starts_with("cannot read the admin token: /nowhere/token: ")
        );
    }
}
