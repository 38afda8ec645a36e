use super::*;

fn csr(params: &CertificateParams, pair: &KeyPair) -> String {
    params.serialize_request(pair).unwrap().pem().unwrap()
}

/// Issues a certificate for `csr` and returns it as DER.
fn issue(csr: &str) -> (CertificateDer<'static>, AccountId, AgentId) {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::load_or_create(directory.path(), "agent-ca", "test").unwrap();
    let account = AccountId::new("acme").unwrap();
    let agent = AgentId::random();
    let request = CertificateRequest::parse(csr).unwrap();
    let now = Timestamp(1_800_000_000);
    let region = Region::new("eu1", "example.com");
    let not_after = now.after(Duration::from_hours(24));
    let pem = authority
        .issue_agent(&region, &account, &agent, &request, now, not_after)
        .unwrap();
    (
        CertificateDer::from_pem_slice(pem.as_bytes()).unwrap(),
        account,
        agent,
    )
}

#[test]
fn an_agent_certificate_identifies_the_agent_in_its_region_only() {
    let pair = KeyPair::generate_for(&PKCS_ED25519).unwrap();
    let (der, account, agent) = issue(&csr(&CertificateParams::default(), &pair));
    let region = Region::new("eu1", "example.com");
    assert_eq!(
        agent_identity(&der, &region),
        Some(AgentIdentity { account, agent })
    );
    assert_eq!(
        agent_identity(&der, &Region::new("eu2", "example.com")),
        None
    );
    let (_, parsed) = X509Certificate::from_der(&der).unwrap();
    assert_eq!(parsed.public_key().raw, pair.subject_public_key_info());
    let lifetime =
        parsed.validity().not_after.timestamp() - parsed.validity().not_before.timestamp();
    assert_eq!(lifetime, 24 * 3600 + 300);
}

#[test]
fn certificates_of_nodes_and_of_agents_are_told_apart() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::load_or_create(directory.path(), "agent-ca", "test").unwrap();
    let region = Region::new("eu1", "example.com");
    let node = NodeIdentity {
        slot: NodeSlot::new(1023).unwrap(),
        session: 1 << 127,
    };
    let issued = authority.issue_node(&region, node).unwrap();
    let der = CertificateDer::from_pem_slice(issued.certificate_pem.as_bytes()).unwrap();
    assert_eq!(
        (node_identity(&der, &region), agent_identity(&der, &region)),
        (Some(node), None)
    );
    assert_eq!(
        node_identity(&der, &Region::new("eu2", "example.com")),
        None
    );
    let authority = CertificateDer::from_pem_slice(authority.certificate_pem().as_bytes()).unwrap();
    assert_eq!(validity(&der), validity(&authority));
    let (agent, ..) = issue(&csr(
        &CertificateParams::default(),
        &KeyPair::generate().unwrap(),
    ));
    assert_eq!(node_identity(&agent, &region), None);
}

#[test]
fn names_and_usages_in_a_signing_request_are_ignored() {
    let pair = KeyPair::generate().unwrap();
    let mut greedy = CertificateParams::new(vec!["evil.example.com".to_owned()]).unwrap();
    greedy.distinguished_name.push(DnType::CommonName, "admin");
    greedy.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    greedy.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    greedy.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::Any,
    ];
    let other = SanType::URI(
        "gw://eu1.example.com/victim/agent/ag_00000000000000000000"
            .try_into()
            .unwrap(),
    );
    greedy.subject_alt_names.push(other);
    let (der, account, agent) = issue(&csr(&greedy, &pair));
    let (_, parsed) = X509Certificate::from_der(&der).unwrap();
    assert!(!parsed.is_ca());
    let usage = parsed.extended_key_usage().unwrap().unwrap().value;
    assert!(usage.client_auth && !usage.server_auth && !usage.any && usage.other.is_empty());
    assert!(!parsed.key_usage().unwrap().unwrap().value.key_cert_sign());
    let names = &parsed
        .subject_alternative_name()
        .unwrap()
        .unwrap()
        .value
        .general_names;
    let uri = format!("gw://eu1.example.com/{account}/agent/{agent}");
    assert_eq!(names[..], [GeneralName::URI(&uri)]);
    assert_eq!(parsed.subject().to_string(), format!("CN={agent}"));
}

#[test]
fn invalid_signing_requests_are_refused_with_the_reason() {
    let refused = |pem: &str| CertificateRequest::parse(pem).unwrap_err();
    let pair = KeyPair::generate().unwrap();
    let good = csr(&CertificateParams::default(), &pair);
    assert_eq!(refused(""), InvalidCsr::NotPem);
    assert_eq!(
        refused(&good.replace("CERTIFICATE REQUEST", "CERTIFICATE")),
        InvalidCsr::NotPem
    );
    assert_eq!(
        refused(&format!("{good}{}", " ".repeat(CSR_MAX))),
        InvalidCsr::NotPem
    );
    let p384 = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
    assert_eq!(
        refused(&csr(&CertificateParams::default(), &p384)),
        InvalidCsr::UnsupportedKey
    );
    // Another key with the same signature.
    let der = CertificateSigningRequestDer::from_pem_slice(good.as_bytes()).unwrap();
    let own = pair.public_key_raw();
    let foreign = KeyPair::generate().unwrap();
    let at = der
        .windows(own.len())
        .position(|bytes| bytes == own)
        .unwrap();
    let mut swapped = der.to_vec();
    swapped[at..at + own.len()].copy_from_slice(foreign.public_key_raw());
    let pem = |der: &[u8]| {
        use base64::Engine;
        let text = base64::engine::general_purpose::STANDARD.encode(der);
        format!("-----BEGIN CERTIFICATE REQUEST-----\n{text}\n-----END CERTIFICATE REQUEST-----\n")
    };
    assert_eq!(refused(&pem(&swapped)), InvalidCsr::BadSignature);
    assert_eq!(refused(&pem(&der[..der.len() - 1])), InvalidCsr::Malformed);
    assert_eq!(
        refused(&pem(&[&der[..], &[0]].concat())),
        InvalidCsr::Malformed
    );
    assert!(CertificateRequest::parse(&pem(&der)).is_ok());
}

#[test]
fn an_authority_is_reused_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let load = || {
        Authority::load_or_create(directory.path(), "ca", "test")
            .unwrap()
            .certificate_pem
    };
    assert_eq!(load(), load());
    let derived = |folder: &Path, purpose| {
        let key = Authority::load_or_create(folder, "ca", "test")
            .unwrap()
            .derive(purpose);
        hmac::sign(&key, b"message").as_ref().to_vec()
    };
    assert_eq!(
        derived(directory.path(), "a"),
        derived(directory.path(), "a")
    );
    assert_ne!(
        derived(directory.path(), "a"),
        derived(directory.path(), "b")
    );
    assert_ne!(
        derived(directory.path(), "a"),
        derived(tempfile::tempdir().unwrap().path(), "a")
    );
    let region = Region::new("eu1", "example.com");
    let server = development_certificate(directory.path(), &region).unwrap();
    let der = CertificateDer::from_pem_slice(server.certificate_pem.as_bytes()).unwrap();
    assert_eq!(agent_identity(&der, &region), None);
}
